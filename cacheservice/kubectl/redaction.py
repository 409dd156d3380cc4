"""Takes secrets out of what goes into a report: from objects by their fields, from any text by what secrets look like.
Pure. Rather too much than too little: whoever reads a report needs the reason, not the value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"
_NOISE = frozenset({"managedFields"})
_COPIES = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})
"""Annotations that repeat the object as someone wrote it."""
_SECRET_WORDS = "pass(?:word|wd|phrase)|secret|token|api[-_]?key|credential|authorization"
_SECRET_NAME = re.compile(rf"(?i)(?:{_SECRET_WORDS}|\w[-_](?:key|auth|pw|pwd)$)")
_HARMLESS_NAME = re.compile(
    r"(?i)(?:file|path|dir|ref|name|namespace|tokens|per[-_]?(?:chunk|token)|mount.*)$"
)
"""A name like LARDER_KEY_FILE or max-num-batched-tokens holds no secret."""
_FLAG = re.compile(r"^--?(?P<name>[\w.-]+)(?P<rest>=.*)?$", re.DOTALL)

_NAMED = re.compile(
    rf"(?i)(?<![\w.-])(?P<name>[\w.-]{{0,60}}(?:{_SECRET_WORDS}|[-_](?:key|auth|pwd?))[\w.-]{{0,60}})"
    r"(?P<between>['\"]?\s*[=:][\s'\"\[(]*|\s+)(?P<value>[^\s'\",;&}\])]{3,})"
)
"""`name=value`, `"name": ["value"`, and `--name value` also over the end of a line."""
_LISTED = re.compile(
    r"^(?P<head>[ -]*name:\s+(?P<name>\S+)\n\s*value:)[ \t]+.*(?:\n(?![ -]*[a-z][a-z ]*:(?:\s|$)).*)*",
    re.IGNORECASE | re.MULTILINE,
)
"""`Name:  X`, `Value:  …` on their own lines: a variable in a KVCache's template, as `kubectl describe` prints it."""
_REFERENCE = "<set"
"""`kubectl describe` of a variable: <set to the key 'k' in secret 's'>."""
_TEXT: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
            re.DOTALL,
        ),
        REDACTED,
    ),
    (re.compile(r"(?i)(\b(?:bearer|basic)\s+)[\w.~+/=-]{4,}"), rf"\g<1>{REDACTED}"),
    (re.compile(r"(\w[\w+.-]*://[^\s/:@'\"]*:)[^\s/@'\"]+(?=@)"), rf"\g<1>{REDACTED}"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|gho_|glpat-|xox[abp]-|AKIA)[\w-]{12,}"), REDACTED),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), REDACTED),
)
"""Private keys, authorization headers, passwords in URLs, tokens of well-known makers, JSON web tokens."""


def redact_text(text: str) -> str:
    """`text` without what looks like a secret."""
    for pattern, instead in _TEXT:
        text = pattern.sub(instead, text)
    return _NAMED.sub(_without_value, _LISTED.sub(_without_listed, text))


def _without_listed(match: re.Match[str]) -> str:
    return f"{match['head']} {REDACTED}" if is_secret_name(match["name"]) else match[0]


def _without_value(match: re.Match[str]) -> str:
    name, between, value = match["name"], match["between"], match["value"]
    is_assigned = "=" in between or ":" in between
    is_flag = name.startswith("--") and not value.startswith("-")
    if not is_secret_name(name) or not (is_assigned or is_flag):
        return match[0]
    if value.startswith((_REFERENCE, REDACTED)):
        return match[0]
    return f"{name}{between}{REDACTED}"


def redact_object(value: Any) -> Any:
    """A copy of a JSON value without values of variables, flags and fields that are named like secrets."""
    if isinstance(value, Mapping):
        if (
            isinstance(value.get("name"), str)
            and is_secret_name(value["name"])
            and "value" in value
        ):
            return {**{key: redact_object(item) for key, item in value.items()}, "value": REDACTED}
        return {
            key: REDACTED if isinstance(item, str) and item and is_secret_name(str(key)) else redact_object(item)
            for key, item in value.items()
            if key not in _NOISE and key not in _COPIES
        }  # fmt: skip
    if isinstance(value, list | tuple):
        return _redact_list(list(value))
    return redact_text(value) if isinstance(value, str) else value


def is_secret_name(name: str) -> bool:
    """Whether a variable, a flag or a field of that name is likely to hold a secret itself."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def _redact_list(values: list[Any]) -> list[Any]:
    """Also for command lines: the value of a flag is in the same word or in the next one."""
    result: list[Any] = []
    is_value = False
    for value in values:
        flag = _FLAG.match(value) if isinstance(value, str) else None
        if is_value and flag is None and isinstance(value, str):
            result.append(REDACTED)
        elif flag is not None and flag["rest"] and is_secret_name(flag["name"]):
            result.append(f"{value.split('=', 1)[0]}={REDACTED}")
        else:
            result.append(redact_object(value))
        is_value = flag is not None and not flag["rest"] and is_secret_name(flag["name"])
    return result
