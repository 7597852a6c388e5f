"""`npuserve rank QUERY DOCUMENT…`: order documents by their relevance to a query."""

from __future__ import annotations

import argparse
import json

from npuserve.cli import connection
from npuserve.cli.embed import read_texts
from npuserve.cli.generate import add_server_arguments
from npuserve.client import ClientError
from npuserve.client.request_builder import RankOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", metavar="QUERY", help="what the documents are compared with")
    parser.add_argument("documents", nargs="+", metavar="DOCUMENT",
                        help="texts to score; - reads one from each line of stdin")
    parser.add_argument("--instruction", metavar="TEXT", help="what makes a document relevant (default: the model's)")
    parser.add_argument("--truncate", action="store_true", help="cut a document that does not fit the context")
    parser.add_argument("--json", action="store_true", help="print one JSON object a document")
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line for each document, the most relevant first. Return 0, or 1 after an error, which is printed."""
    documents = read_texts(args.documents)
    options = RankOptions()
    if args.instruction is not None:
        options["instruction"] = args.instruction
    if args.truncate:
        options["truncate"] = True
    try:
        with connection.open_client(args) as client:
            scores = client.rank(args.query, documents, args.timeout, **options).scores
    except (ClientError, connection.ConnectionFailed) as error:
        return connection.print_error(error, args)
    for index in sorted(range(len(documents)), key=lambda index: -scores[index]):
        score = round(scores[index], 6)
        if args.json:
            print(json.dumps({"index": index, "score": score, "document": documents[index]}, ensure_ascii=False))
        else:
            print(f"{score:.6f}  {documents[index]}")
    return 0
