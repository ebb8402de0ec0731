"""The redactor hides secrets, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.provenance.redact import HIDDEN, Redactor, is_credential_file, is_secret_name

SECRET_NAMES = """
AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_ACCESS_KEY_ID HF_TOKEN HUGGING_FACE_HUB_TOKEN
HUGGINGFACE_TOKEN WANDB_API_KEY OPENAI_API_KEY ANTHROPIC_API_KEY GITHUB_TOKEN GH_TOKEN
GITHUB_PAT GITLAB_PRIVATE_TOKEN CI_JOB_TOKEN PGPASSWORD MYSQL_PWD PASSWORD PASSPHRASE
GPG_PASSPHRASE DB_PASS MY_PASSWD AZURE_CLIENT_SECRET AZURE_STORAGE_KEY
AZURE_STORAGE_CONNECTION_STRING AZURE_STORAGE_SAS_TOKEN AZURE_DEVOPS_EXT_PAT TENSORTAP_KEY
COMET_API_KEY NEPTUNE_API_TOKEN KAGGLE_KEY SLACK_BOT_TOKEN SLACK_WEBHOOK_URL DISCORD_WEBHOOK
SENTRY_DSN DJANGO_SECRET_KEY SECRET apiKey clientSecret APIKEY NPM_AUTH_TOKEN HTTP_AUTH
AUTHORIZATION JWT SESSION_COOKIE DOCKER_AUTH_CREDENTIALS MASTER_ENCRYPTION_KEY NETRC
NGC_API_KEY REPLICATE_API_TOKEN MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_TOKEN
""".split()

KEPT = {
    "TOKENIZERS_PARALLELISM": "false",
    "MONKEY": "business",
    "KEYBOARD": "us",
    "XKB_DEFAULT_KEYMAP": "de",
    "PATH": "/usr/bin:/bin",
    "PWD": "/home/me",
    "OLDPWD": "/home",
    "SSH_AUTH_SOCK": "/tmp/agent.123",
    "SSH_ASKPASS": "/usr/bin/askpass",
    "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/keys/service.json",
    "AWS_SHARED_CREDENTIALS_FILE": "/home/me/.aws/credentials",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
    "NETRC": "/home/me/.netrc",
    "MAX_TOKENS": "4096",
    "MAX_TOKEN": "512",
    "PAD_TOKEN": "<pad>",
    "TOKEN_TYPE": "bpe",
    "AUTHOR": "Ada",
    "COMPASS": "north",
    "PASSES": "3",
    "SECRETARY": "Bob",
    "AZURE_TENANT_ID": "11111111-2222-3333-4444-555555555555",
    "AZURE_CLIENT_ID": "11111111-2222-3333-4444-555555555555",
    "AZURE_REGION": "westeurope",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "PYTHONHASHSEED": "0",
    "DATABASE_URL": "sqlite:///data.db",
    "REDIS_URL": "redis://localhost:6379/0",
    "GIT_SSH_COMMAND": "ssh -i /home/me/.ssh/id_rsa",
    "LS_COLORS": "rs=0:di=01;34:ln=01;36",
    "HF_HOME": "/data/hf",
    "TASK": "sk-learn-classification-of-things",
    "COMMIT": "0f1e2d3c4b5a69788796a5b4c3d2e1f001234567",
}


@pytest.mark.parametrize("name", SECRET_NAMES)
@pytest.mark.attack("secrets in a run")
def test_hides_values_of_secret_names(name):
    value = "s3cr3t value, not a path"
    assert Redactor(environ={}).variables({name: value}) == {name: HIDDEN}


@pytest.mark.parametrize("name", KEPT)
def test_keeps_other_values(name):
    assert Redactor(environ={}).variables({name: KEPT[name]}) == {name: KEPT[name]}


@pytest.mark.parametrize(
    "value",
    [
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "a1B2_" * 10,
        "glpat-" + "a1B2c3D4e5F6g7H8i9J0",
        "sk-" + "a1B2" * 12,
        "sk-proj-" + "a1B2-_" * 8,
        "sk-ant-api03-" + "a1B2" * 10,
        "hf_" + "aBcD" * 9,
        "AKIAIOSFODNN7EXAMPLE",
        "ASIAIOSFODNN7EXAMPLE",
        "xoxb-123456789012-abcdefghijkl",
        "AIza" + "SyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
        "Bearer abcdef1234567890",
    ],
)
@pytest.mark.parametrize("around", ["{}", "--data={} more", "x {}"])
def test_hides_known_formats_under_any_name(value, around):
    stored = Redactor(environ={}).variables({"HARMLESS": around.format(value)})["HARMLESS"]
    assert HIDDEN in stored
    assert value.removeprefix("Bearer ")[10:] not in stored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("https://me:pass@example.org/r.git", "https://***@example.org/r.git"),
        ("https://token@github.com/a/b", "https://***@github.com/a/b"),
        ("https://me:p@ss:w@example.org/", "https://***@example.org/"),
        ("postgres://u:p@db:5432/x", "postgres://***@db:5432/x"),
        ("postgresql+psycopg2://u:p@db/x", "postgresql+psycopg2://***@db/x"),
        ("redis://:p@host:6379/0", "redis://***@host:6379/0"),
        ("mongodb+srv://u:p@c.example.org", "mongodb+srv://***@c.example.org"),
        ("ssh://git@github.com/a/b", "ssh://git@github.com/a/b"),
        ("git@github.com:a/b.git", "git@github.com:a/b.git"),
        ("https://github.com/a/b.git", "https://github.com/a/b.git"),
        ("https://h/x?token=abc&n=1", "https://h/x?token=***&n=1"),
        ("https://h/x?n=1&X-Amz-Signature=abc#f", "https://h/x?n=1&X-Amz-Signature=***#f"),
        ("https://a.blob.core.windows.net/c?sv=1&sig=ab%2F", "https://a.blob.core.windows.net/c?sv=1&sig=***"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/***"),
    ],
)  # fmt: skip
def test_urls(url, stored):
    redactor = Redactor(environ={})
    assert redactor.text(url) == stored
    assert redactor.variables({"DATABASE_URL": url}) == {"DATABASE_URL": stored}


def test_arguments():
    command = """train.py --lr 0.1 --token=abc --api-key abc -v --password abc --hub_token abc
        --text-key content --label_key=label --max-tokens 512 --pad-token <pad> --key 42
        wandb.api_key=abc +auth.token=abc model.name=gpt --use-auth-token data/train.bin
        --access-key=abc --sort-key=A1b2C3d4E5f6G7h8I9j0K1 --url=https://u:p@h/ --token -x"""
    assert Redactor(environ={}).arguments(command.split()) == (
        """train.py --lr 0.1 --token=*** --api-key *** -v --password *** --hub_token ***
        --text-key content --label_key=label --max-tokens 512 --pad-token <pad> --key 42
        wandb.api_key=*** +auth.token=*** model.name=gpt --use-auth-token data/train.bin
        --access-key=*** --sort-key=*** --url=https://***@h/ --token -x""".split()
    )


def test_hides_repeated_values():
    environ = {"HF_TOKEN": "correct-horse", "NOTE": "it is correct-horse", "SHORT_KEY": "abc"}
    redactor = Redactor(environ=environ)
    assert redactor.arguments(["--x", "correct-horse", "abc"]) == ["--x", HIDDEN, "abc"]
    assert redactor.variables(environ)["NOTE"] == f"it is {HIDDEN}"


def test_rule_of_the_user():
    environ = {"TENSORTAP_SECRETS": "internal|corp-[0-9]+", "MY_INTERNAL": "x", "N": "a corp-77 b"}
    assert Redactor(environ=environ).variables(environ) == {
        "MY_INTERNAL": HIDDEN,
        "N": "a *** b",
        "TENSORTAP_SECRETS": HIDDEN,  # it may well spell one out
    }
    redactor = Redactor({"TENSORTAP_SECRETS": "^lang$"})
    assert redactor.variables({"LANG": "C"}) == {"LANG": HIDDEN}
    assert redactor.arguments(["--lang=C"]) == ["--lang=***"]


def test_invalid_rule_still_hides_its_text(caplog):
    redactor = Redactor(environ={"TENSORTAP_SECRETS": "top(secret"})
    assert redactor.text("a top(secret b") == "a *** b"
    assert "not a regular expression" in caplog.text


@pytest.mark.slow
@given(st.text(), st.text())
def test_any_text_is_accepted(name, value):
    redactor = Redactor(environ={})
    stored = redactor.variables({name: value})[name]
    assert redactor.text(stored) == stored or HIDDEN in stored
    redactor.arguments([name, value, f"--{name}={value}"])
    is_secret_name(name)


def test_credential_files():
    for name in (".env", ".env.local", "server.pem", "id_rsa", ".netrc", "credentials.json",
                 "my-service-account-1.json", "secrets.yaml"):  # fmt: skip
        assert is_credential_file(name), name
    for name in ("env.py", ".env.example", "keys.py", "id_rsa.py", "train.py", "tokens.json"):
        assert not is_credential_file(name), name
