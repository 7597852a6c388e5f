"""Regular expressions of the formats of JSON Schema, in the syntax of the grammar library.

Every text that they accept is valid by the RFC of the format, and by the checks of the Python package `jsonschema`,
which wrongly refuses some relative JSON pointers, such as "205". They leave out some valid texts: leap seconds, the
year 0000, fractions of a second of more than 6 digits, `t` and `z` in lower case, mail addresses with quotation marks
or an IP address, or with a long part beside dots (`_LOCAL_PARTS`), zones of IPv6 addresses, host names with Punycode,
with a last label that begins with a digit, or with long labels (`_LABELS`). Formats that JSON Schema does not define
are annotations, as the specification says.
"""

from __future__ import annotations

_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = (
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])"
    r"|(?:0[48]|[2468][048]|[13579][26])00)"
)
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?{_ZONE}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = r"[0-9a-fA-F]{1,4}"
_IPV6 = "(?:" + "|".join([
    rf"(?:{_GROUP}:){{7}}{_GROUP}",
    *(rf"(?:{_GROUP}:){{{n}}}(?::{_GROUP}){{1,{7 - n}}}" for n in range(1, 7)),
    rf":(?::{_GROUP}){{1,7}}",
    rf"(?:{_GROUP}:){{6}}{_IPV4}",
    *(rf"(?:{_GROUP}:){{{n}}}(?::{_GROUP}){{0,{5 - n}}}:{_IPV4}" for n in range(1, 6)),
    rf":(?::{_GROUP}){{0,5}}:{_IPV4}",
    rf"(?:{_GROUP}:){{1,7}}:",
    "::",
]) + ")"
_INNER = "[a-zA-Z0-9-]"
_OUTER = "[a-zA-Z0-9]"


def _label(first: str, max_length: int) -> str:
    """Return the expression of a host name's label of 1 to `max_length` characters, without "--" at the third place.

    Two hyphens there mark Punycode (RFC 5891), which would have to be valid.
    """
    ends = rf"(?:{_INNER}{{0,{max_length - 4}}}{_OUTER})?", rf"(?:{_INNER}{{0,{max_length - 5}}}{_OUTER})?"
    return rf"{first}(?:{_OUTER}|{_INNER}{_OUTER}{ends[0]}|{_INNER}-{_OUTER}{ends[1]})?"


_LABELS = ((2, 4, 63), (5, 5, 46), (6, 6, 37), (7, 8, 26), (9, 16, 11), (17, 32, 5))
"""Least and most labels of a host name, and the length of the second and later ones, so that it has at most 253
characters. The first label has at most 63."""
_HOSTNAME = "(?:" + "|".join([_label("[a-zA-Z]", 63), *(
    rf"{_label(_OUTER, 63)}\.(?:{_label(_OUTER, size)}\.){{{low - 2},{high - 2}}}{_label('[a-zA-Z]', min(size, 61))}"
    for low, high, size in _LABELS)]) + ")"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_LOCAL_PARTS = ((48, 1, 15), (31, 1, 32), (15, 1, 48), (20, 2, 20), (15, 3, 15), (12, 4, 12))
"""Longest first part of a mail address before the @, number of further parts after a dot each, and their length, so
that it has at most 64 characters (RFC 5321)."""
_LOCAL = "(?:" + "|".join([rf"{_ATOM}{{1,64}}", rf"{_ATOM}(?:\.?{_ATOM}){{0,31}}", *(
    rf"{_ATOM}{{1,{first}}}(?:\.{_ATOM}{{1,{size}}}){{{count}}}" for first, count, size in _LOCAL_PARTS)]) + ")"
_UNRESERVED = r"a-zA-Z0-9._~!$&'()*+,;=\-"
_PERCENT = r"%[0-9a-fA-F]{2}"
_PCHAR = rf"(?:[{_UNRESERVED}:@]|{_PERCENT})"
_AUTHORITY = (
    rf"(?:(?:[{_UNRESERVED}:]|{_PERCENT})*@)?(?:\[{_IPV6}\]|(?:[{_UNRESERVED}]|{_PERCENT})*)(?::[0-9]{{0,5}})?"
)
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:\#(?:{_PCHAR}|[/?])*)?"
_PATH = rf"(?:/{_PCHAR}*)*"
_URI = rf"[a-zA-Z][a-zA-Z0-9+.\-]*:(?://{_AUTHORITY}{_PATH}|/(?:{_PCHAR}+{_PATH})?|{_PCHAR}+{_PATH}){_TAIL}"
_RELATIVE = rf"(?://{_AUTHORITY}{_PATH}|/(?:{_PCHAR}+{_PATH})?|(?:[{_UNRESERVED}@]|{_PERCENT})+{_PATH}|){_TAIL}"
_POINTER = r"(?:/(?:[^\x00-\x1f~/]|~[01])*)*"
_DURATION_TIME = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)",
    "email": f"{_LOCAL}@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:\#|{_POINTER})",
}
"""Format -> expression of the whole text."""
FORMATS |= {"idn-email": FORMATS["email"], "idn-hostname": FORMATS["hostname"],
            "iri": FORMATS["uri"], "iri-reference": FORMATS["uri-reference"],
            "ip-address": FORMATS["ipv4"], "host-name": FORMATS["hostname"]}
"""An internationalized format accepts the plain texts; the last two are names of draft 3."""
UNSUPPORTED = frozenset({"regex", "uri-template"})
"""Formats of JSON Schema that are refused."""
