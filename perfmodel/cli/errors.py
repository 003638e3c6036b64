"""Error output on standard error: one sentence, or one object with `--json`."""

from __future__ import annotations

import json
import sys

from perfmodel.foundation.error_objects import ErrorCode, error_object
from perfmodel.foundation.errors import presentable


def print_error(sentence: str, *, code: ErrorCode, as_json: bool, full: str = "") -> None:
    """Print an error on standard error.

    full   unshortened sentence, added to the JSON object
    """
    sentence = " ".join(presentable(sentence).split())
    if not as_json:
        print(f"perfmodel: {sentence}", file=sys.stderr)
        return
    full = " ".join(presentable(full).split()) or sentence
    content: dict[str, str | list[str] | None] = {**error_object(full, code), "message": sentence}
    if full != sentence:
        content["details"] = full
    print(json.dumps(content, ensure_ascii=False), file=sys.stderr)
