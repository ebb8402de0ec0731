"""Secrets planted in the environment, the command and the code are not readable in a run."""

import base64
import hashlib
import json
import random
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.provenance import redact, reproduce
from tensortap.provenance.pace import Pace
from tensortap.provenance.patch import redact_patch
from tensortap.provenance.redact import HIDDEN, Redactor, looks_random
from tests.provenance.conftest import Repo

LETTERS = string.ascii_letters + string.digits


def random_word(name, length, letters=LETTERS):
    """Return a word that depends on a name only, and that has every kind of its letters."""
    rng = random.Random(name)
    return "".join(rng.choice(letters) for _ in range(length - 3)) + letters[0] + letters[-1] * 2


def planted(name, prefix="", length=32, letters=LETTERS):
    return prefix + random_word(name, length, letters)


HEX = "0123456789abcdef"
# known formats, under names that say nothing
SHAPES = {
    "github": planted("github", "ghp_", 36),
    "github_fine": planted("github_fine", "github_pat_", 40),
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
    "twilio": planted("twilio", "SK", 32, HEX),
    "telegram": planted("telegram", "123456789:AA", 33),
    "vault": planted("vault", "hvs.", 90),
    "shopify": planted("shopify", "shpat_", 32, HEX),
    "grafana": planted("grafana", "glsa_", 40),
}
# names of variables that say that their value is a secret
NAMED = {
    name: planted(name, length=12)
    for name in """SSHPASS VAULT_UNSEAL MYSQL_PW DOCKER_AUTH_CONFIG AUTH_HEADER PGPASSWORD MYSQL_PWD
    DB_PASS WANDB_API_KEY AWS_SECRET_ACCESS_KEY AZURE_CLIENT_SECRET GITHUB_PAT SENTRY_DSN
    SESSION_COOKIE REDIS_AUTH HTTP_AUTH_HEADER VAULT_PASSCODE SMTP_CREDS""".split()
}  # fmt: skip
# text inside of variables with ordinary names
INSIDE = {
    "json_password": '{{"host": "db", "password": "{}"}}',
    "json_nested": '{{"auths": {{"registry.io": {{"auth": "{}"}}}}}}',
    "json_escaped": '{{"config": "{{\\"api_key\\": \\"{}\\"}}"}}',
    "dsn": "host=db user=me password={} dbname=x",
    "url": "postgres://me:{}@db:5432/x",
    "query": "https://h/x?n=1&access_token={}&m=2",
    "header": "Authorization: token {}",
    "basic": "curl -H 'Proxy-Authorization: Basic {}'",
    "bearer": "curl -H 'Authorization: Bearer {}' https://h",
    "cookie": "Cookie: session={}; theme=dark",
    "option": "--opt 1 --db-password {} --verbose",
    "azure": "DefaultEndpointsProtocol=https;AccountKey={};EndpointSuffix=x",
    "webhook": "https://hooks.slack.com/services/T0/B0/{}",
}
INSIDE_SECRETS = {name: planted(name, length=20) for name in INSIDE}
INSIDE_SECRETS["basic"] = base64.b64encode(b"me:" + planted("basic").encode()).decode()
ARGUMENTS = {
    "pw": ["--pw", "{}"], "p": ["-p", "{}"], "user": ["--user", "me:{}"], "u": ["-u", "me:{}"],
    "equals": ["--token={}"], "hydra": ["+db.password={}"], "json": ['--config={{"secret": "{}"}}'],
    "key": ["--api-key", "{}"], "attached": ["-p{}"],
}  # fmt: skip
ARGUMENT_SECRETS = {name: planted(f"argument {name}", length=14) for name in ARGUMENTS}
KEY_LINES = [
    base64.b64encode(hashlib.sha512(f"key {n}".encode()).digest()[:48]).decode() for n in range(6)
]
PRIVATE_KEY = "\n".join(
    ["-----BEGIN OPENSSH PRIVATE KEY-----", *KEY_LINES, "-----END OPENSSH PRIVATE KEY-----", ""]
)
# in code and configuration: tracked and changed, tracked and next to a change, untracked
CODE = {
    "assigned": 'db_password = "{}"\n',
    "keyword": 'client = Client(api_key="{}", timeout=3)\n',
    "dict": 'config = {{"client_secret": "{}"}}\n',
    "comment": '# token: "{}"\n',
}
CODE_SECRETS = {name: planted(f"code {name}", length=18) for name in CODE}
CONFIG = {"yaml": "password: {}\n", "ini": "smtp_password = {}\n", "shell": "export DB_PW={}\n"}
CONFIG_SECRETS = {name: planted(f"config {name}", length=12) for name in CONFIG}
RANDOM = {name: planted(f"random {name}", length=40) for name in ("quoted", "bare", "argument")}
EVERYTHING = {
    **SHAPES, **NAMED, **{f"in {name}": value for name, value in INSIDE_SECRETS.items()},
    **{f"-- {name}": value for name, value in ARGUMENT_SECRETS.items()},
    **{f"code {name}": value for name, value in CODE_SECRETS.items()},
    **{f"config {name}": value for name, value in CONFIG_SECRETS.items()},
    **{f"random {name}": value for name, value in RANDOM.items()},
    **{f"key {number}": line for number, line in enumerate(KEY_LINES)},
    "remote": planted("remote", length=16), "message": planted("message", "ghp_", 36),
    "context": planted("context", "hf_", 34), "removed": planted("removed", "hf_", 34),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(run_python, tmp_path_factory):
    """The run of a program with secrets wherever people put them."""
    repo = Repo(tmp_path_factory.mktemp("planted") / "repo")
    old = ["import os", f"A = '{EVERYTHING['context']}'", f"B = '{EVERYTHING['removed']}'", "C = 1"]
    repo.write("settings.py", "\n".join(old) + "\n")
    repo.git("remote", "add", "origin", f"https://me:{EVERYTHING['remote']}@example.org/r.git")
    repo.commit(f"use {EVERYTHING['message']}")
    shapes = [f"{name} = '{value}'" for name, value in SHAPES.items()]
    code = [text.format(CODE_SECRETS[name]).rstrip() for name, text in CODE.items()]
    repo.write("settings.py", "\n".join([*old[:2], "B = 2", "C = 1", *code]) + "\n")
    repo.write("notes.txt", "\n".join(shapes) + "\n")
    repo.write("deploy.py", f'KEY = """\\\n{PRIVATE_KEY}"""\n')
    repo.write(
        "new.py",
        f"a = '{RANDOM['quoted']}'\nc = run('x', '{RANDOM['argument']}')\n",
    )
    repo.write("bare.txt", f"the door opens with {RANDOM['bare']}\n")
    for name, text in CONFIG.items():
        repo.write(f"conf.{name}", text.format(CONFIG_SECRETS[name]))
    environ = {f"PLAIN_{name}": value for name, value in SHAPES.items()} | NAMED
    environ |= {f"INSIDE_{n}": text.format(INSIDE_SECRETS[n]) for n, text in INSIDE.items()}
    environ["DEPLOY"] = PRIVATE_KEY
    arguments = [w.format(ARGUMENT_SECRETS[n]) for n, words in ARGUMENTS.items() for w in words]
    program = """
        import pathlib, sys
        from tensortap.provenance import collect
        pathlib.Path("run").mkdir()
        collect("run", modifications=False)
    """
    run_python(repo.path, program, *arguments, environ=environ)
    return repo, repo.path / "run"


def test_plants_enough():
    assert len(EVERYTHING) >= 60
    assert len(set(EVERYTHING.values())) == len(EVERYTHING)


@pytest.mark.attack("secrets in a run")
@pytest.mark.slow
def test_no_planted_secret_is_readable(run):
    _, folder = run
    stored = b"".join(file.read_bytes() for file in sorted(folder.iterdir()))
    assert len(stored) > 10_000
    readable = [name for name, value in EVERYTHING.items() if value.encode() in stored]
    assert readable == []
    parts = [name for name, value in EVERYTHING.items() if value[-10:].encode() in stored]
    assert parts == []


@pytest.mark.attack("secrets in a run")
def test_other_detector_finds_nothing(run):
    """detect-secrets searches the run; what it knows and we do not would be found here."""
    from detect_secrets.core.scan import scan_line
    from detect_secrets.settings import transient_settings

    plugins = """ArtifactoryDetector AWSKeyDetector AzureStorageKeyDetector BasicAuthDetector
        CloudantDetector DiscordBotTokenDetector GitHubTokenDetector GitLabTokenDetector
        IbmCloudIamDetector IbmCosHmacDetector JwtTokenDetector MailchimpDetector NpmDetector
        OpenAIDetector PrivateKeyDetector PypiTokenDetector SendGridDetector SlackDetector
        SoftlayerDetector SquareOAuthDetector StripeDetector TelegramBotTokenDetector
        TwilioKeyDetector""".split()
    _, folder = run
    with transient_settings({"plugins_used": [{"name": name} for name in plugins]}):
        found = [
            (file.name, secret.type, line)
            for file in folder.iterdir()
            for line in file.read_text().splitlines()
            for secret in scan_line(line)
            if HIDDEN not in str(secret.secret_value)
        ]
    assert found == []


@pytest.mark.slow
def test_patch_applies_and_says_what_to_fill_in(run, tmp_path):
    repo, folder = run
    info = json.loads((folder / "git_info.json").read_text())["project_git_info"]
    assert "held credentials" in info["warnings"][0]
    made = reproduce(folder, tmp_path / "again")
    project = made.folder / "project"
    assert not any("does not apply" in text for text in made.missing)
    # what the commit has is taken from there
    assert EVERYTHING["context"] in (project / "settings.py").read_text()
    wanted = (repo.path / "settings.py").read_text().splitlines()
    for number, (old, new) in enumerate(
        zip(wanted, (project / "settings.py").read_text().splitlines(), strict=True), 1
    ):
        told = any(f"fill in settings.py, line {number}" in text for text in made.missing)
        assert (old != new) == told == (HIDDEN in new)
    told = [text for text in made.missing if "a secret that was not stored" in text]
    assert len(told) == len(SHAPES) + len(CODE) + len(CONFIG) + len(RANDOM) + len(KEY_LINES) + 2


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
token_id_key = f"{modality}_token_id"; TOKEN_BBOX_OPEN_STRING = "<0x00>"; pnc_token = "<|pnc|>"
"boi_token_id": "boi_token_index", token_type_ids_pattern="all_zeros", chain_break_token="|"
model = AutoModel.from_pretrained("Qwen/Qwen3-VL-8B-Instruct"); "Qwen2_5OmniThinkerModel"
"Wav2Vec2BertForAudioFrameClassification", "Ernie4_5_MoeForCausalLM", "Qwen2_5OmniDiTConfig"
image_url = "https://cdn.example.org/production/uploads/66d732effe6684fc16b12c28/Io_5Xk9Qz2.png"
"""


def test_ordinary_code_stays_as_it_is():
    redactor = Redactor(environ={})
    for line in ORDINARY.strip().splitlines():
        assert redactor.text(line, literals_only=True, entropy=True) == line


def test_random_words():
    found = [looks_random(planted(number, length=40)) for number in range(1000)]
    assert sum(found) > 980
    for word in ORDINARY.replace('"', " ").replace("(", " ").split():
        assert not looks_random(word), word


def test_lines_of_a_patch_keep_their_numbers(tmp_path):
    """Removed lines that look like headers, and files with other newlines."""
    secret = SHAPES["github"]
    patch = (
        "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n"
        f"--- {secret}\n+++ {secret}\n a\r\n \x0c{secret}\n"
        "diff --git a/y b/y\nGIT binary patch\nliteral 3\nKc$@<O00001\n\n"
    ).encode()
    file = tmp_path / "p"
    file.write_bytes(patch)
    assert redact_patch(file, Redactor(environ={}), (), Pace(rest=0)) == [5, 6, 8]
    assert file.read_bytes() == patch.replace(secret.encode(), HIDDEN.encode())


def test_hides_the_line_of_code_that_git_repeats_in_front_of_a_hunk(tmp_path):
    file = tmp_path / "p"
    secret = CODE_SECRETS["assigned"]
    file.write_text(
        "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n"
        f"@@ -9,2 +9,2 @@ db_password = '{secret}'\n-a\n+b\n c\n"
    )
    assert redact_patch(file, Redactor(environ={}), (), Pace(rest=0)) == [4]
    assert f"@@ -9,2 +9,2 @@ db_password = '{HIDDEN}'\n-a\n+b\n c\n" in file.read_text()


@given(st.from_regex(redact._SHAPES))
@pytest.mark.slow
def test_search_of_many_lines_finds_every_shape(text):
    """Lines that are not suspects are never looked at, so that large patches take seconds."""
    text = "".join(text.splitlines())
    redactor = Redactor(environ={})
    if redactor.text(text) != text:
        assert list(redactor.suspects([b"x", text.encode("utf-8", "surrogatepass")])) == [1]


def test_search_of_many_lines_finds_every_planted_secret():
    redactor = Redactor(environ=NAMED)
    texts = [
        *EVERYTHING.values(), *PRIVATE_KEY.splitlines(),
        *(text.format(INSIDE_SECRETS[name]) for name, text in INSIDE.items()),
        *(text.format(CODE_SECRETS[name]) for name, text in CODE.items()),
        *(text.format(CONFIG_SECRETS[name]) for name, text in CONFIG.items()),
    ]  # fmt: skip
    lines = [text.encode() for text in texts]
    for entropy in (False, True):
        changed = [
            i for i, text in enumerate(texts) if redactor.text(text, entropy=entropy) != text
        ]
        assert changed
        assert set(changed) <= set(redactor.suspects(lines, entropy=entropy))


def test_few_lines_of_ordinary_code_are_looked_at_closely():
    lines = Path(redact.__file__).with_name("git.py").read_bytes().splitlines(keepends=True)
    assert len(list(Redactor(environ={}).suspects(lines, entropy=True))) < len(lines) / 3
