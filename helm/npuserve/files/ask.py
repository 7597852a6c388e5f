"""`helm test` of the gateway: a prompt through the OpenAI API, which fails unless it is answered within a minute.

Reads GATEWAY_URL, and GATEWAY_KEY and GATEWAY_CA (a file) if they are set.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

URL = os.environ["GATEWAY_URL"]
HEADERS = {"Content-Type": "application/json"}
if os.environ.get("GATEWAY_KEY"):
    HEADERS["Authorization"] = f"Bearer {os.environ['GATEWAY_KEY']}"


def call(path, body=None):
    """Return the JSON of an answer. body: sent by POST; None: a GET. Raises OSError."""
    data = json.dumps(body).encode() if body else None
    trusted = os.environ.get("GATEWAY_CA")
    context = ssl.create_default_context(cafile=trusted) if trusted else None
    request = urllib.request.Request(URL + path, data, HEADERS)
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return json.load(answer)


def generate():
    """Send a prompt to the first model and print its text."""
    model = call("/v1/models")["data"][0]["id"]
    answer = call("/v1/completions", {"model": model, "prompt": "Once upon a time", "max_tokens": 8})
    print(f"{model}: {answer['choices'][0]['text']}")


def main():
    patience = time.monotonic() + float(os.environ.get("GATEWAY_WAIT", "60"))
    while True:
        try:
            return generate()
        except (OSError, LookupError, ValueError) as error:
            detail = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else repr(error)
            if time.monotonic() > patience:
                sys.exit(f"no answer from {URL}: {detail}")
            time.sleep(1)


if __name__ == "__main__":
    main()
