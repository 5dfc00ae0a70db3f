"""What is written is run: README.md, CHANGELOG.md and docs/*.md are checked against the product.

An HTML comment on the line before a fenced block says what to do with it:

    <!-- run -->          the block's training commands are run for real, on fewer steps (marker `jobs`),
                          and all of them must end with the same weights
    <!-- script -->       Python blocks that are one program, in the order of the page, on one rank and on two
                          (marker `jobs`); both must print the same
    <!-- after a run -->  a Python block that needs runs/latest (marker `jobs`)
    <!-- file: NAME -->   a block that later commands and programs of the same page call NAME
    <!-- prints -->       the text that the Python block before it prints
    <!-- drawn: NAME -->  what docs/draw.py makes
    <!-- output: ... -->  what docs/outputs.py has written, on a quiet machine

    python tests/docs/test_docs.py      writes the table of config keys in docs/config.md anew
    python docs/draw.py                 writes the drawings anew
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mpipipe import config, ops
from mpipipe.__main__ import COMMANDS
from mpipipe.config import sections
from mpipipe.config.read import _kinds
from mpipipe.errors import ConfigError, MpipipeError
from mpipipe.pipeline import Pipeline
from mpipipe.planner.schedules.registry import BUILT_IN

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
REPORTS = REPOSITORY / "docs" / "reports.md"
KEYS = REPOSITORY / "docs" / "config.md"
FOLDERS = (
    "examples/", "docs/", "slurm/", "mpipipe/", "tests/", "benchmarks/", "kernels/", "containers/", ".ci/",
)  # fmt: skip
PROGRAMS = {"make", "mpirun", "srun", "sbatch", "python", "git", "cd", "source", "cp", "module"}
ANY_CONFIG = "config.yaml"  # in a command: whatever the reader's file is called
TABLE = re.compile(r"(?<=<!-- keys -->\n).*(?=<!-- end of keys -->)", re.DOTALL)

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    note: str  # the comment before it
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


@cache
def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        lines = page.read_text().splitlines()
        start = None
        for i, line in enumerate(lines):
            if line.startswith("```") and start is None:
                start = i
            elif line.startswith("```") and start is not None:
                note = re.fullmatch(r"<!-- (.*) -->", lines[start - 1])
                text = "\n".join(lines[start + 1 : i]) + "\n"
                found.append(Block(page, start + 1, lines[start][3:], note[1] if note else "", text))
                start = None
        assert start is None, f"{page.name}:{start}: the block is never closed"
    return found


def of(*languages: str, note: str | None = None) -> list[Any]:
    """The blocks of some languages, as pytest parameters."""
    chosen = (b for b in blocks() if b.language in languages and note in (None, b.note))
    return [pytest.param(b, id=b.place) for b in chosen]


def prose(page: Path) -> str:
    """A page without its blocks and comments."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def test_every_block_has_a_language_that_is_checked() -> None:
    known = {"yaml", "json", "python", "bash", "console", "text"}
    assert [b.place for b in blocks() if b.language not in known] == []
    notes = {"", "run", "script", "after a run", "prints", "output"}
    named = ("file: ", "drawn: ", "output: ")
    assert [b.place for b in blocks() if b.note not in notes and not b.note.startswith(named)] == []


# -- YAML and Python ---------------------------------------------------------------------------


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_a_config(block: Block) -> None:
    config.parse(block.text, block.place)


def printed(block: Block) -> str:
    """Runs a Python block; what it prints."""
    out = io.StringIO()
    code = compile(block.text, block.place, "exec")
    with contextlib.redirect_stdout(out):
        exec(code, {"__name__": "docs"})
    return out.getvalue()


@pytest.mark.parametrize("block", of("python", note=""))
def test_python_runs_and_prints_what_is_said(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    following = blocks()[blocks().index(block) + 1 :]
    said = following[0].text if following and following[0].note == "prints" else None
    assert said in (None, printed(block))


@pytest.mark.slow
def test_every_schedule_and_forward_alone_is_drawn_and_every_drawing_is_shown() -> None:
    assert {f"units {name}" for name in (*BUILT_IN, "forward")} <= drawings().keys()
    assert {f"drawn: {name}" for name in drawings()} == {b.note for b in blocks() if "drawn: " in b.note}


@pytest.mark.slow
@pytest.mark.parametrize("block", of("text"))
def test_drawings_are_those_of_the_code(block: Block) -> None:
    if block.note.startswith("drawn: "):
        said = "write it anew: python docs/draw.py"
        assert block.text == drawings()[block.note.removeprefix("drawn: ")] + "\n", said


@cache
def drawings() -> dict[str, str]:
    path = REPOSITORY / "docs" / "draw.py"
    found: dict[str, str] = runpy.run_path(str(path))["drawings"]()
    return found


# -- commands ----------------------------------------------------------------------------------


def commands(block: Block) -> Iterator[list[str]]:
    """The command lines of a block: all of a bash block, those after `$ ` of a console block."""
    joined = block.text.replace("\\\n", " ")
    for line in joined.splitlines():
        if block.language == "bash" or line.startswith("$ "):
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                yield words


def training(words: list[str]) -> tuple[str, list[str]] | None:
    """(config file, overrides) of a training command, without its flags, else None."""
    variables = dict(w.split("=", 1) for w in words[1:] if "=" in w)
    given: list[str] = []
    for program in ("mpipipe.train", "slurm/train.sh"):
        if program in words:
            given = words[words.index(program) + 1 :]
    if words[:2] == ["make", "train"]:
        given = [variables.get("CONFIG", "examples/gpt.yaml"), *shlex.split(variables.get("ARGS", ""))]
    if "--plan" in given:
        del given[given.index("--plan") + 1]
    first, *overrides = [word for word in given if not word.startswith("--")] or [""]
    return (first, overrides) if given else None


def config_text(page: Path, name: str) -> str:
    """A config that a command names: a file of the repository, or one that the page has shown."""
    shown = [b.text for b in blocks() if b.page == page and b.note == f"file: {name}"]
    if shown or name == ANY_CONFIG:
        return shown[0] if shown else ""
    return (REPOSITORY / name).read_text()


@cache
def makefile() -> tuple[set[str], set[str]]:
    """(targets, variables) of the Makefile."""
    text = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):(?!=)", text, re.MULTILINE))
    return targets, set(re.findall(r"^([A-Z_]+) \?=", text, re.MULTILINE))


def wrong_make(words: list[str]) -> list[str]:
    targets, variables = makefile()
    names = [(w.split("=")[0], "=" in w) for w in words[1:]]
    return [name for name, sets in names if name not in (variables if sets else targets)]


def unknown_parts(words: list[str]) -> list[str]:
    """What a sub-command of `python -m mpipipe` does not know: its name, or a flag."""
    at = words.index("mpipipe") if "mpipipe" in words else 0
    if at == 0 or words[at - 1] != "-m":
        return []
    name, *given = words[at + 1 : words.index("--") if "--" in words else None]  # behind -- is a launcher
    if name not in COMMANDS:
        return [name]
    source = inspect.getsource(importlib.import_module(COMMANDS[name][0]))
    return [w for w in given if w.startswith("-") and f'"{w}"' not in source]


def missing_files(words: list[str]) -> list[str]:
    names = (w.split("::")[0] for w in words if w.startswith(FOLDERS))
    return [name for name in names if not (REPOSITORY / name).exists()]


@pytest.mark.parametrize("block", of("bash", "console"))
def test_commands_name_what_exists(block: Block) -> None:
    for words in commands(block):
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # environment of the command
            words = words[1:]
        assert words[0].split("/")[-1] in PROGRAMS, f"{block.place}: unknown program {words[0]}"
        assert missing_files(words) == [], block.place
        if words[0] == "make":
            assert wrong_make(words) == [], block.place
        assert unknown_parts(words) == [], block.place
        job = training(words)
        if job and "mpipipe: error: " not in block.text:
            config.parse(config_text(block.page, job[0]), job[0], job[1])


@pytest.mark.parametrize("block", of("console"))
def test_errors_of_the_config_are_shown_as_they_are(block: Block) -> None:
    """A console block with a training command and an error: the error is what that command says."""
    said = re.findall(r"^mpipipe: error: (.*)$", block.text, re.MULTILINE)
    jobs = [job for job in map(training, commands(block)) if job]
    for (name, overrides), text in zip(jobs, said, strict=bool(said)):
        with pytest.raises(ConfigError) as caught:
            config.parse(config_text(block.page, name), name, overrides)
        assert str(caught.value) == text


# -- real runs ---------------------------------------------------------------------------------


def scripts() -> list[Any]:
    """The programs of the pages, as pytest parameters."""
    parts = [b for b in blocks() if b.note == "script"]
    pages = dict.fromkeys(b.page for b in parts)
    return [pytest.param(page, [b for b in parts if b.page == page], id=page.name) for page in pages]


@pytest.mark.parametrize(("page", "parts"), scripts())
def test_programs_are_python(page: Path, parts: list[Block]) -> None:
    for block in parts:
        compile(block.text, block.place, "exec")


# The programs of all pages, one after the other: most of what a start takes are imports.
EACH = """\
import os, runpy, sys
for folder in sys.argv[1:]:
    os.chdir(folder)
    print(f"-- {os.path.basename(folder)}", flush=True)
    runpy.run_path("script.py")
    sys.stdout.flush()
"""


@pytest.mark.jobs
def test_programs_print_the_same_on_one_rank_and_on_two(launch: Launch, tmp_path: Path) -> None:
    said = []
    for ranks in (1, 2):
        folders = []
        for page, parts in (param.values for param in scripts()):
            folder = tmp_path / str(ranks) / page.stem
            folder.mkdir(parents=True)
            folders.append(str(folder))
            for b in blocks():
                if b.page == page and b.note.startswith("file: "):
                    (folder / b.note.removeprefix("file: ")).write_text(b.text)
            (folder / "script.py").write_text("\n".join(b.text for b in parts))
        done = launch(ranks, "-c", EACH, *folders, cwd=tmp_path, timeout_s=300)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert any(line.startswith("plan: ") for line in lines)
        said.append([line for line in lines if not line.startswith(("-- ", "plan: "))])
        printed = re.split(r"^-- .*\n", done.stdout, flags=re.MULTILINE)
        assert sum(bool(text.strip()) for text in printed) >= len(folders), done.stdout
    assert said[0] == said[1]


SHORT = ("train.steps=2", "eval.batches=1", "sample.length=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


def run(launch: Launch, words: list[str], block: Block, *overrides: str, cwd: Path) -> None:
    job = training(words)
    assert job is not None, f"{block.place}: {words} is no training command"
    (cwd / "config.yaml").write_text(config_text(block.page, job[0]))
    ranks = int(words[words.index("-n") + 1]) if "-n" in words else 1
    done = launch(
        ranks, "-m", "mpipipe.train", "config.yaml", *job[1], *SHORT, *overrides, cwd=cwd, timeout_s=120
    )
    assert done.returncode == 0, done.stderr


def weights_sha256(run_dir: Path) -> str:
    return str(json.loads((run_dir / "summary.json").read_text())["weights_sha256"])


@pytest.mark.jobs
@pytest.mark.parametrize("block", of("bash", "console", note="run"))
def test_marked_commands_train_to_the_same_weights(block: Block, launch: Launch, folder: Path) -> None:
    hashes = []
    for words in commands(block):
        run(launch, words, block, cwd=folder)
        hashes.append(weights_sha256(folder / "runs" / "latest"))
    assert len(hashes) > 1
    assert len(set(hashes)) == 1


@pytest.fixture
def finished(folder: Path, launch: Launch) -> Path:
    """A folder with runs/latest in it, by the commands above or anew."""
    if not (folder / "runs").exists():
        done = launch(1, "-m", "mpipipe.train", REPOSITORY / "examples/gpt.yaml", *SHORT, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.jobs
@pytest.mark.parametrize("block", of("python", note="after a run"))
def test_python_that_reads_a_run(block: Block, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished)
    printed(block)


@pytest.mark.jobs
def test_the_run_folder_holds_what_is_listed(finished: Path) -> None:
    there = {path.name for path in (finished / "runs" / "latest").iterdir()}
    there = {name for name in there if not name.startswith("corpus-")}  # its name tells of which text
    # SHORT asks for no sample, and nobody for a page; nothing stood still
    later = {"sample.txt", "report.html", "flight"}
    assert run_files() - later == there


# -- prose -------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The link targets of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        assert "://" not in target, f"{page.name}: {target}: the pages must be readable without a network"
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_in_the_text_exist(page: Path) -> None:
    """Files, tests, make targets, config keys and Python names between backquotes."""
    words = dict.fromkeys(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page)))
    assert [word for word in words if not exists(word)] == []


def exists(word: str) -> bool:
    """Whether the word is right, as far as it is of a kind that can be checked."""
    if word.startswith(FOLDERS) and " " not in word:
        file, _, test = word.partition("::")
        path = REPOSITORY / file
        return path.exists() and (not test or f"def {test}(" in path.read_text())
    if word.startswith("make "):
        return wrong_make(shlex.split(word)) == []
    match = re.fullmatch(r"(\w+)\.(\w+)(?:=(.*))?", word)
    if match and match[1] in config.Config.model_fields and word not in {*run_files(), "run.json"}:
        return allowed(match[1], match[2], match[3])
    return named(word) if re.fullmatch(r"mpipipe(\.\w+)+", word) else True


@cache
def run_files() -> set[str]:
    """The names in the table of what a run leaves behind."""
    part = REPORTS.read_text().partition("## What a run leaves behind\n")[2].partition("\n## ")[0]
    return {name.rstrip("/") for name in re.findall(r"^\| `([\w./]+)` \|", part, re.MULTILINE)}


def allowed(section: str, key: str, value: str | None) -> bool:
    """Whether there is such a key, and the value is legal for some kind of the section."""
    if (section, key) not in {row[:2] for row in keys()}:
        return False
    given = [] if value is None else [f"{section}.{key}={value}"]
    bases = _SMALLEST.get(section, {"": []}).values()
    for base in bases:
        with contextlib.suppress(ConfigError):
            config.parse("", "config", [*base, "train.batch=64", *given])
            return True
    return False


# section -> kind -> settings with which any value of that kind is legal
_SMALLEST = {
    "model": {
        tag: [f"model.name={'a:b' if tag.startswith('package') else tag}", "data.name=synthetic"]
        for tag in _kinds("model")
    },
    "data": {
        "text": [],
        "tokens": ["data.name=tokens", "data.path=a"],
        "synthetic": ["data.name=synthetic"],
        "images": ["data.name=images", "data.path=a", "model.name=resnet"],
        "digits": ["data.name=digits", "model.name=resnet"],
        "mixture": ["data={name: mixture, sources: [text], weights: [1.0]}"],
        "package.module:name": ["data.name=a:b"],
    },
}


def named(path: str) -> bool:
    """Whether mpipipe.a.b is a module, or a name in the module mpipipe.a."""
    module, _, name = path.rpartition(".")
    with contextlib.suppress(ImportError):
        return importlib.import_module(path) is not None
    return hasattr(importlib.import_module(module), name)


def test_every_promise_has_a_test() -> None:
    """That they exist is test_names_in_the_text_exist."""
    rows = re.findall(
        r"^\| (.*) \| (.*) \|$", (REPOSITORY / "docs" / "promises.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 10
    assert [promise for promise, tests in rows[1:] if "`tests/" not in tests] == []


# -- the table of config keys --------------------------------------------------------------------


@cache
def keys() -> list[tuple[str, str, str, str, str, str]]:
    """(section, key, kinds, default, values, meaning) of every key, from the sections themselves: the meaning
    is the comment on the line of the field. Kinds that have a key in common share its row."""
    tree, lines = ast.parse(source := Path(sections.__file__).read_text()), source.splitlines()
    meaning = {
        (node.name, field.target.id): lines[(field.end_lineno or 0) - 1].partition("  # ")[2]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    found: dict[tuple[str, str, str, str, str], list[str]] = {}
    for section, field in config.Config.model_fields.items():
        kinds: dict[str, Any] = _kinds(section) if section in _SMALLEST else {"": field.annotation}
        if section in _SMALLEST:
            default = json.dumps(getattr(config.Config(), section).name)
            tags = ", ".join(f"`{tag}`" for tag in kinds)
            found[section, "name", default, tags, "decides which other keys there are"] = []
        for tag, kind in kinds.items():
            for key, schema in kind.model_json_schema()["properties"].items():
                if key == "name" and section in _SMALLEST:
                    continue
                text = meaning[kind.__name__, key]
                assert text or "enum" in schema, f"sections.py: {kind.__name__}.{key} has no comment"
                default = json.dumps(schema["default"]) if "default" in schema else ""
                found.setdefault((section, key, default, values(schema), text), []).append(tag)
    return [(s, k, ", ".join(filter(None, tags)), d, v, text) for (s, k, d, v, text), tags in found.items()]


def values(schema: dict[str, Any]) -> str:
    """The legal values of a JSON schema, in words."""
    if "anyOf" in schema:
        return " or ".join(values(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{v}`" for v in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "type" not in schema:
        return "data section"
    if schema["type"] == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        return f"list of {values(items[0])}"
    if "pattern" in schema:
        return "`package.module:name`" if ":" in schema["pattern"] else "`file.csv`"
    words = {"string": "text", "boolean": "`true` or `false`", "null": "`null`", "object": "keys with values"}
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    shown = [f"{sign} {schema[k]:g}" for k, sign in limits.items() if k in schema and abs(schema[k]) < 1e9]
    return " ".join([words.get(schema["type"], schema["type"]), ", ".join(shown)]).strip()


def table() -> str:
    """The table in docs/config.md."""
    out = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for section, key, kind, default, legal, text in keys():
        only = f" ({kind})" if kind else ""
        first = f"`{default}`" if default else "none: give one"
        out.append(f"| `{section}.{key}`{only} | {first} | {legal} | {text} |")
    return "\n".join(out) + "\n"


def test_the_table_of_keys_is_that_of_the_config() -> None:
    shown = TABLE.search(KEYS.read_text())
    assert shown is not None
    assert shown[0] == table(), "write it anew: python tests/docs/test_docs.py"


def test_the_table_of_arguments_is_that_of_pipeline() -> None:
    page = (REPOSITORY / "docs" / "python.md").read_text()
    shown = re.findall(
        r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\|", page.partition("\n## All arguments\n")[2], re.MULTILINE
    )
    arguments = inspect.signature(Pipeline).parameters.values()
    none = inspect.Parameter.empty
    assert shown == [
        (p.name, "" if p.default is none else repr(p.default).replace("'", '"')) for p in arguments
    ]
    methods = re.findall(
        r"^\| `(\w+)` \| ", page.partition("\n## Train\n")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert [name for name in methods if not callable(getattr(Pipeline, name, None))] == []


def test_the_table_of_operators_is_that_of_their_signatures() -> None:
    page = (REPOSITORY / "docs" / "kernels.md").read_text()
    shown = re.findall(r"^\| `(\w+)(\(.*?\))` \| ", page.partition("\n## Call one")[2], re.MULTILINE)
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \| .* \| `\w+", page, re.MULTILINE)))
    assert {name for name, _ in shown} == {*listed, "add_gemm"}
    for name, arguments in shown:
        found = inspect.signature(getattr(ops, name))
        bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
        assert str(inspect.Signature(bare)) == arguments


# -- the messages ------------------------------------------------------------------------------


@cache
def templates() -> str:
    """Every message that the sources can print, with … for each value."""
    texts = [path.read_text() for path in sorted(REPOSITORY.glob(".ci/*")) if path.is_file()]
    texts.append((REPOSITORY / "slurm/train.sh").read_text())
    for path in sorted((REPOSITORY / "mpipipe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n\n".join(re.sub(r"\s+", " ", text) for text in texts)


@pytest.mark.slow
def test_quoted_messages_are_those_of_the_code() -> None:
    """The headings of docs/troubleshooting.md that quote a message: ### `text`."""
    page = REPOSITORY / "docs" / "troubleshooting.md"
    quoted = re.findall(r"^### `(.*)`$", page.read_text(), re.MULTILINE)
    assert len(quoted) > 20
    assert [text for text in quoted if text not in templates()] == []


def test_every_class_of_error_has_its_section() -> None:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    heads = " ".join(re.findall(r"^## (.*)$", page, re.MULTILINE))
    assert [kind.__name__ for kind in MpipipeError.__subclasses__() if kind.__name__ not in heads] == []


if __name__ == "__main__":
    KEYS.write_text(TABLE.sub(lambda _: table(), KEYS.read_text()))
