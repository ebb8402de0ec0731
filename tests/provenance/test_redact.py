"""Secrets in the environment, the command and the code are not readable in a run."""

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.rooms.provenance import collect, reproduce
from tensortap.rooms.provenance.git import redact_patch
from tensortap.rooms.provenance.redact import HIDDEN, Redactor, is_credential_file, is_secret_name
from tests.provenance.conftest import Repo

SECRET_NAMES = """
AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_ACCESS_KEY_ID HF_TOKEN WANDB_API_KEY OPENAI_API_KEY
GITHUB_PAT CI_JOB_TOKEN PGPASSWORD MYSQL_PWD PASSPHRASE DB_PASS MY_PASSWD AZURE_CLIENT_SECRET
AZURE_STORAGE_CONNECTION_STRING TENSORTAP_KEY SLACK_WEBHOOK_URL DISCORD_WEBHOOK SENTRY_DSN SECRET
apiKey clientSecret APIKEY HTTP_AUTH AUTHORIZATION JWT SESSION_COOKIE DOCKER_AUTH_CREDENTIALS
SSHPASS MYSQL_PW DOCKER_AUTH_CONFIG AUTH_HEADER VAULT_PASSCODE SMTP_CREDS FERNET_KEYS TOTP_OTP
COOKIE_SIGNING PASSWORD_SALT PHP_SESSION APP_LICENSE RAILS_SECRET_KEY_BASE API_KEY_2
APP_FERNET_PRIMARY SIGNING_K OTP_SEED USER_SALT_X WOLFRAM_LICENSE_X SESSIONID TS_AUTHKEY PRIVATEKEY
API_BEARER BEARER CARD_PIN SEED_PHRASE walletSeedPhrase MNEMONIC WALLET_SEED RECOVERY_PHRASE
HF_TOKEN_WRITE OPENAI_API_KEY_DEV PASSWORD_DB PRIVATE_KEY_PEM SECRETKEY ENCRYPTIONKEY SECRET_PROD
""".split()

KEPT = """
SEED=42 PYTHONHASHSEED=0 GLOBAL_SEED=12345678901234567890 DATA_SEED=run-7 PIN_MEMORY=1 PINNED=abc
TOKENIZERS_PARALLELISM=false MONKEY=business KEYBOARD=us PATH=/usr/bin:/bin PWD=/home/me
SSH_AUTH_SOCK=/tmp/agent.123 SSH_ASKPASS=/usr/bin/askpass AWS_WEB_IDENTITY_TOKEN_FILE=/var/run/token
GOOGLE_APPLICATION_CREDENTIALS=/home/me/keys/service.json MAX_TOKENS=4096 PAD_TOKEN=<pad>
TOKEN_TYPE=bpe AUTHOR=Ada COMPASS=north PASSES=3 SECRETARY=Bob CUDA_VISIBLE_DEVICES=0,1
AZURE_TENANT_ID=11111111-2222-3333-4444-555555555555 DATABASE_URL=sqlite:///data.db
REDIS_URL=redis://localhost:6379/0 LS_COLORS=rs=0:di=01;34:ln=01;36
TASK=sk-learn-classification-of-things COMMIT=0f1e2d3c4b5a69788796a5b4c3d2e1f001234567
""".split()


@pytest.mark.attack("secrets in a run")
def test_hides_values_of_secret_names():
    variables = dict.fromkeys(SECRET_NAMES, "s3cr3t value, not a path")
    assert set(Redactor(environ={}).variables(variables).values()) == {HIDDEN}
    others = dict(pair.split("=", 1) for pair in KEPT)
    assert Redactor(environ={}).variables(others) == dict(sorted(others.items()))


LETTERS = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


def planted(name, prefix="", length=32, letters=LETTERS):
    """Return a word that depends on a name only, and that ends with a digit."""
    rng = random.Random(name)
    return prefix + "".join(rng.choice(letters) for _ in range(length - 2)) + "7" + letters[-1]


# well-known formats, under names that say nothing
SHAPES = {
    "github": planted("github", "ghp_", 36),
    "github_fine": planted("github_fine", "github_pat_", 22) + "_" + planted("rest", length=59),
    "gitlab": planted("gitlab", "glpat-", 20),
    "openai": planted("openai", "sk-proj-", 48),
    "anthropic": planted("anthropic", "sk-ant-api03-", 60),
    "huggingface": planted("huggingface", "hf_", 34),
    "aws": planted("aws", "AKIA", 16, string.ascii_uppercase + string.digits),
    "slack": "xoxb-" + planted("slack", "123456789012-", 24),
    "slack_app": planted("slack_app", "xapp-1-", 30),
    "google": planted("google", "AIza", 35),
    "google_oauth": planted("google_oauth", "ya29.", 40),
    "google_client": planted("google_client", "GOCSPX-", 28),
    "npm": planted("npm", "npm_", 36),
    "pypi": planted("pypi", "pypi-AgEIcHlwaS5vcmc", 80),
    "docker": planted("docker", "dckr_pat_", 27),
    "sendgrid": f"SG.{planted('sendgrid1', length=22)}.{planted('sendgrid2', length=43)}",
    "stripe": planted("stripe", "sk_live_", 24),
    "groq": planted("groq", "gsk_", 52),
    "replicate": planted("replicate", "r8_", 37),
    "nvidia": planted("nvidia", "nvapi-", 64),
    "databricks": planted("databricks", "dapi", 32, HEX),
    "digitalocean": planted("digitalocean", "dop_v1_", 64, HEX),
    "jwt": f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{planted('jwt', length=43)}",
    "telegram": planted("telegram", "123456789:AA", 33),
    "vault": planted("vault", "hvs.", 90),
    "shopify": planted("shopify", "shpat_", 32, HEX),
    "grafana": planted("grafana", "glsa_", 40),
    "bearer": planted("bearer", "Bearer ", 30),
}
# names in front of a value, inside of other text
INSIDE = {
    "json_password": '{{"host": "db", "password": "{}"}}',
    "json_nested": '{{"auths": {{"registry.io": {{"auth": "{}"}}}}}}',
    "json_escaped": '{{"config": "{{\\"api_key\\": \\"{}\\"}}"}}',
    "json_in_a_string": 'config = \'{{"password": "{}"}}\'',
    "dsn": "host=db user=me password={} dbname=x",
    "url": "postgres://me:{}@db:5432/x",
    "query": "https://h/x?n=1&access_token={}&m=2",
    "header": "Authorization: token {}",
    "basic": "curl -H 'Proxy-Authorization: Basic {}'",
    "cookie": "Cookie: session={}; theme=dark",
    "option": "--opt 1 --db-password {} --verbose",
    "azure": "DefaultEndpointsProtocol=https;AccountKey={};EndpointSuffix=x",
    "webhook": "https://hooks.slack.com/services/T0/B0/{}",
    "assigned": 'db_password = "{}"',
    "keyword": 'client = Client(api_key="{}", timeout=3)',
    "dict": 'config = {{"client_secret": "{}"}}',
    "comment": '# token: "{}"',
    "yaml": "password: {}",
    "ini": "smtp_password = {}",
    "shell": "export DB_PW={}",
    "mysql": "mysql -u me -p{} db",
    "sshpass": "sshpass -p {} ssh host",
    "docker": "docker login -u me -p {} registry.io",
    "curl": "curl -s -u 'me:{}' https://h",
}
KEY_LINES = [planted(f"key {number}", length=64) for number in range(6)]
PRIVATE_KEY = "\n".join(
    ["-----BEGIN OPENSSH PRIVATE KEY-----", *KEY_LINES, "-----END OPENSSH PRIVATE KEY-----"]
)
INSIDE_SECRETS = {name: planted(name, length=20) for name in INSIDE}
EVERYTHING = [*SHAPES.values(), *INSIDE_SECRETS.values(), *KEY_LINES]
LINES = [
    *(f"{name} = '{value}'" for name, value in SHAPES.items()),
    *(text.format(INSIDE_SECRETS[name]) for name, text in INSIDE.items()),
]


def readable(stored):
    return [secret for secret in EVERYTHING if secret[-10:] in stored]


@pytest.mark.attack("secrets in a run")
def test_hides_secrets_in_text():
    redactor = Redactor(environ={})
    for line in LINES:
        assert readable(line)
        for text in (line, f"+    {line}  # more"):
            assert not readable(redactor.text(text)), text
        assert not readable(redactor.variables({"HARMLESS": line})["HARMLESS"])


URLS = {
    "https://me:pass@example.org/r.git": "https://***@example.org/r.git",
    "https://token@github.com/a/b": "https://***@github.com/a/b",
    "https://me:p@ss:w@example.org/": "https://***@example.org/",
    "postgresql+psycopg2://u:p@db/x": "postgresql+psycopg2://***@db/x",
    "redis://:p@host:6379/0": "redis://***@host:6379/0",
    "ssh://git@github.com/a/b": "ssh://git@github.com/a/b",
    "git@github.com:a/b.git": "git@github.com:a/b.git",
    "https://github.com/a/b.git": "https://github.com/a/b.git",
    "https://h/x?token=abc&n=1": "https://h/x?token=***&n=1",
    "https://h/x?n=1&X-Amz-Signature=abc#f": "https://h/x?n=1&X-Amz-Signature=***#f",
    "https://hooks.slack.com/services/T0/B0/xyz": "https://hooks.slack.com/***",
}


def test_urls():
    redactor = Redactor(environ={})
    for url, stored in URLS.items():
        assert redactor.text(url) == stored
        assert redactor.variables({"DATABASE_URL": url}) == {"DATABASE_URL": stored}


def test_arguments():
    command = """train.py --lr 0.1 --token=abc --api-key abc -v --password abc --hub_token abc
        --key abc --auth abc --pw=abc --max-tokens 512 --pad-token <pad> --key 42
        wandb.api_key=abc +auth.token=abc model.name=gpt --use-auth-token data/train.bin
        --keyboard us --tokenizer gpt2 --config={"secret":"a1b2c3d4"} --url=https://u:p@h/
        --token -x"""
    assert Redactor(environ={}).arguments(command.split()) == (
        """train.py --lr 0.1 --token=*** --api-key *** -v --password *** --hub_token ***
        --key *** --auth *** --pw=*** --max-tokens 512 --pad-token <pad> --key 42
        wandb.api_key=*** +auth.token=*** model.name=gpt --use-auth-token data/train.bin
        --keyboard us --tokenizer gpt2 --config={"secret":"***"} --url=https://***@h/
        --token -x""".split()
    )
    login = ["sshpass", "-p", "abc", "ssh", "host"]
    assert Redactor(environ={}).arguments(login) == ["sshpass", "-p", HIDDEN, "ssh", "host"]
    assert Redactor(environ={}).arguments(["train.py", "-p", "abc"]) == ["train.py", "-p", "abc"]
    assert Redactor(environ={}).arguments(["train.py", "--pin", "4711"])[-1] == HIDDEN


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
    is_secret_name(name, value)


def test_credential_files():
    for name in (".env", ".env.local", "server.pem", "id_rsa", ".netrc", "credentials.json",
                 "my-service-account-1.json", "secrets.yaml"):  # fmt: skip
        assert is_credential_file(name), name
    for name in ("env.py", ".env.example", "keys.py", "id_rsa.py", "train.py", "tokens.json"):
        assert not is_credential_file(name), name


@pytest.fixture(scope="module")
def run(run_python, tmp_path_factory):
    """The run of a program with secrets wherever people put them."""
    repo = Repo(tmp_path_factory.mktemp("planted") / "repo")
    old = ["import os", f"A = '{SHAPES['github']}'", f"B = '{SHAPES['npm']}'", "C = 1"]
    repo.write("settings.py", "\n".join(old) + "\n")
    repo.git("remote", "add", "origin", f"https://me:{SHAPES['vault']}@example.org/r.git")
    repo.commit(f"use {SHAPES['groq']}")
    repo.write("settings.py", "\n".join([*old[:2], "B = 2", "C = 1", *LINES]) + "\n")
    repo.write("notes.txt", "\n".join(LINES) + "\n")
    repo.write("deploy.py", f'KEY = """\\\n{PRIVATE_KEY}"""\n')
    environ = {f"PLAIN_{number}": line for number, line in enumerate(LINES)}
    environ |= {"DEPLOY": PRIVATE_KEY, "MY_TOKEN": SHAPES["aws"]}
    program = """
        import pathlib, sys
        from tensortap.rooms.provenance import collect
        pathlib.Path("run").mkdir()
        collect("run", modifications=False)
    """
    run_python(repo.path, program, *LINES, environ=environ)
    return repo.path / "run"


@pytest.mark.attack("secrets in a run")
@pytest.mark.slow
def test_no_planted_secret_is_readable_in_a_run(run):
    stored = "".join(file.read_text() for file in sorted(run.iterdir()))
    assert len(stored) > 10_000
    assert len(EVERYTHING) > 50
    assert readable(stored) == []


@pytest.mark.slow
def test_patch_applies_and_says_what_to_fill_in(repo, tmp_path):
    repo.write("settings.py", "A = 1\n")
    repo.commit()
    repo.write("settings.py", f"A = 1\nB = '{SHAPES['github']}'\n")
    (repo.path / "run").mkdir()
    collect(repo.path / "run", start=repo.path, modifications=False)
    made = reproduce(repo.path / "run", tmp_path / "again")
    assert (made.folder / "project/settings.py").read_text() == f"A = 1\nB = '{HIDDEN}'\n"
    assert "secrets in 1 lines: look for *** in project/" in made.missing


ORDINARY = """
tokenizer.pad_token = tokenizer.eos_token
tokenizer = AutoTokenizer.from_pretrained("gpt2", use_auth_token=True)
eos_token="</s>", unk_token="<unk>"
key = jax.random.PRNGKey(0)
for key, value in state_dict.items():
api_key = os.environ["API_KEY"]
password = getpass.getpass()
token: str | None = None
def forward(self, token_ids, key_padding_mask=None):
    attention = softmax(query @ key.T / math.sqrt(self.head_dim))
assert hashlib.sha256(data).hexdigest() == "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d"
commit = "0f1e2d3c4b5a69788796a5b4c3d2e1f001234567"
model = torchvision.models.resnet50(weights=ResNet50_Weights.IMAGENET1K_V2)
class TransformerDecoderLayerWithRotaryEmbedding2D(nn.Module):
https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/transformer.py#L123
path = "/data/experiments/2026-11-15/run_00017/checkpoints/step_000120000.safetensors"
sort_key = "name"; max_tokens = 4096; secret_santa = False
basic functionality of the Basic block; the bearer of bad news
Token Embedding and Basic TransformerBlock: see Token Embeddings2D; Bearer of the Token
# cookie: keep the session of the browser
seed = "experiment"; seeds = [1, 2]; pin = 17; mysql -u me -p db; docker run -p 8080:80 image
key = l2norm(key, dim=-1, eps=1e-6); self.embed_tokens = Gemma3TextScaledWordEmbedding(
tokens = " ".join([self.token] + tokens); inference_session: Sam2VideoInferenceSession,
contours = max(contours, key=cv2.contourArea); cache_key=f"encoder_layer_{stage_idx}",
headers = {"Authorization": f"Bearer {token}"}; NO_KEY = "no key yet: call tap.serve() 1 time"
token_id_key = f"{modality}_token_id"; TOKEN_BBOX_OPEN_STRING = "<0x00>"; pnc_token = "<|pnc|>"
"boi_token_id": "boi_token_index", token_type_ids_pattern="all_zeros", chain_break_token="|"
model = AutoModel.from_pretrained("Qwen/Qwen3-VL-8B-Instruct"); "Qwen2_5OmniThinkerModel"
"Wav2Vec2BertForAudioFrameClassification", "Ernie4_5_MoeForCausalLM", "Qwen2_5OmniDiTConfig"
image_url = "https://cdn.example.org/production/uploads/66d732effe6684fc16b12c28/Io_5Xk9Qz2.png"
"""


def test_ordinary_code_stays_as_it_is():
    redactor = Redactor(environ={})
    for line in ORDINARY.strip().splitlines():
        assert redactor.text(line) == line


def test_lines_of_a_patch_keep_their_numbers(tmp_path):
    """Removed lines that look like headers, files with other newlines, binary files."""
    secret = SHAPES["github"]
    patch = (
        f"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@ password = '{secret}'\n"
        f"--- {secret}\n+++ {secret}\n a\r\n \x0c{secret}\n"
        f"diff --git a/y b/y\nGIT binary patch\nliteral 3\n{secret}\n\n"
    ).encode()
    file = tmp_path / "p"
    file.write_bytes(patch)
    assert redact_patch(file, Redactor(environ={})) == 4
    assert file.read_bytes() == patch.replace(secret.encode(), HIDDEN.encode(), 4)


def test_half_of_a_private_key_ends_with_its_hunk(tmp_path):
    file = tmp_path / "p"
    first, *rest = PRIVATE_KEY.splitlines()[:3]
    file.write_text(
        f"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,3 @@\n {first}\n-{rest[0]}\n+{rest[1]}\n"
        "\\ No newline at end of file\n@@ -9 +9 @@\n-a\n+b\n"
    )
    assert redact_patch(file, Redactor(environ={})) == 3
    assert file.read_text().endswith(
        f" {HIDDEN}\n-{HIDDEN}\n+{HIDDEN}\n\\ No newline at end of file\n@@ -9 +9 @@\n-a\n+b\n"
    )
