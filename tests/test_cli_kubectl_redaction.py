"""What a report leaves out, and what it must not leave out."""

from __future__ import annotations

import json

import pytest

from cacheservice.kubectl.redaction import REDACTED, redact_object, redact_text

SECRET = "planted-7f3a9c"


@pytest.mark.parametrize(
    "text",
    [
        f"password={SECRET}",
        f"REDIS_PASSWORD:  {SECRET}",
        f"level=INFO token={SECRET} node=a",
        f'{{"api_key": "{SECRET}"}}',
        f"non-default args: {{'api_key': ['{SECRET}'], 'model': 'm'}}",
        f"Authorization: Bearer {SECRET}",
        f"authorization: bearer {SECRET}",
        f"connecting to rediss://larder:{SECRET}@redis:6379/0",
        f"redis://:{SECRET}@h",
        f"vllm serve m --api-key {SECRET} --port 1",
        f"      --api-key\n      {SECRET}\n      --port",
        f"--api-key={SECRET}",
        f"  Env:\n    Name:   DOWNLOAD_TOKEN\n    Value:  {SECRET}\n    Name:   B",
        f"    Name:   SIGNING_KEY\n    Value:  first line\n{SECRET}\n    Name:   B",
        f"- name: DB_PASSWORD\n  value: {SECRET}\n",
        f"OPENAI_KEY={SECRET}",
        f"require_password={SECRET}\nuser x password: {SECRET}",
        f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}\n-----END EC PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
        f"using hf_{SECRET.replace('-', '')}abcdef",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.planted-7f3a9c",
    ],
)
def test_what_looks_like_a_secret_is_left_out_of_text(text: str) -> None:
    redacted = redact_text(text)
    assert SECRET not in redacted
    assert SECRET.replace("-", "") not in redacted
    assert REDACTED in redacted


@pytest.mark.parametrize(
    "text",
    [
        "hit_tokens=896 asked_tokens=1000",
        "--max-num-batched-tokens 2048 --port 8000",
        '"bytes_per_token": 1024,"tokens_per_chunk":256',
        "LARDER_KEY_FILE=/etc/larder/tls/tls.key",
        "HF_TOKEN:  <set to the key 'token' in secret 'hf'>  Optional: false",
        'secret "demo-agent-tls" not found',
        "Secrets are not shown, the token of nobody either",
        "tolerations: key: nvidia.com/gpu",
        "  Env:\n    Name:   DOWNLOAD_TOKEN\n    Value From:\n      Secret Key Ref:\n        Name:  hf",
        "    Name:   STAND_IN\n    Value:  ready\n    Name:   TOKEN_FILE\n    Value:  /etc/token",
        'cacheservice_tokens_total{kind="load"} 5.0',
        "http://127.0.0.1:8000/v1",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_text(text) == text


def test_variables_and_flags_lose_their_values_and_keep_their_names() -> None:
    pod = {
        "metadata": {
            "name": "p",
            "managedFields": [{"manager": "kubectl"}],
            "annotations": {
                "kubectl.kubernetes.io/last-applied-configuration": f'{{"x": "{SECRET}"}}',
                "note": f"password={SECRET}",
            },
        },
        "spec": {
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "containers": [
                {
                    "args": ["--api-key", SECRET, "--port", "8000", f"--hf-token={SECRET}"],
                    "env": [
                        {"name": "REDIS_PASSWORD", "value": SECRET},
                        {"name": "MODEL", "value": "m"},
                        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
                    ],
                }
            ],
            "password": SECRET,
        },
    }  # fmt: skip
    redacted = redact_object(pod)
    assert SECRET not in json.dumps(redacted)
    assert "managedFields" not in redacted["metadata"]
    container = redacted["spec"]["containers"][0]
    assert container["args"] == [
        "--api-key", REDACTED, "--port", "8000", f"--hf-token={REDACTED}"
    ]  # fmt: skip
    assert container["env"][1:] == pod["spec"]["containers"][0]["env"][1:]  # type: ignore[index]
    assert redacted["spec"]["tolerations"] == pod["spec"]["tolerations"]
