"""JSON schemas of the benchmarks of constraints: lists of objects with more elements than any answer has.

people   short names, free text and numbers
order    long names of properties, and enumerations of long texts, beside free text
report   nearly all text is forced: after the first tokens of a value or name, one text may follow
"""

from __future__ import annotations

import json
from typing import Any

PROPERTIES: dict[str, dict[str, Any]] = {
    "people": {
        "name": {"type": "string", "maxLength": 24}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["red", "green", "blue"]}}},
    "order": {
        "customer_name": {"type": "string", "maxLength": 24}, "shipping_address": {"type": "string", "maxLength": 40},
        "number_of_parcels": {"type": "integer", "minimum": 1, "maximum": 99},
        "delivery_status": {"enum": ["waiting for payment by the customer", "waiting for delivery by the carrier",
                                     "delivered to the customer", "returned to the sender"]}},
    "report": {
        "temperature_of_the_cooling_water": {"enum": ["within the permitted range", "above the permitted range"]},
        "pressure_in_the_primary_circuit": {"enum": ["within the permitted range", "below the permitted range"]},
        "recommendation_of_the_operator": {"enum": [
            "continue without any change until the next inspection", "stop the pump and inform the operator"]}},
}


def endless_list(name: str) -> str:
    """Return the schema of a list of at least 512 objects. An object has at least ten tokens, so an answer is longer
    than 5000 tokens."""
    return json.dumps({"type": "array", "minItems": 512, "items": {
        "type": "object", "additionalProperties": False, "required": [*PROPERTIES[name]],
        "properties": PROPERTIES[name]}})
