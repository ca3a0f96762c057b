"""Checks the rules of the design that a syntax tree can show: who imports whom, and where knowledge may live.

    python tools/architecture.py        prints every violation as `file:line: what is wrong`, and fails if there is one

Each file is parsed once. A rule is a function from a `Source` to its violations; `RULES` lists them all.
docs/architecture.md has the import table in words.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "src" / "microscale"

# Part of the core → what else of the core it may import. `planning.ops` admits that module only.
MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "settings": {"errors"},
    "hardware": {"errors"},
    "formats": {"errors"},
    "text": {"errors", "settings"},
    "kernels": {"formats", "hardware", "errors"},
    "kernels.compiling": {"kernels.launch", "errors"},
    "planning": {"kernels", "formats", "hardware", "settings", "errors"},
    "models": {"planning.ops", "planning.recording_ops", "formats", "parallel.sharding", "errors"},
    "parallel": {"errors"},
    "engine": {"models", "planning", "kernels.compiling", "parallel", "hardware", "settings", "errors", "version"},
    "server": {"engine", "text", "settings", "errors", "version"},
    "server.model_files": {"server", "models", "engine", "text", "errors"},
    "doctor": {"hardware", "errors", "version"},
    "__init__": {"version"},
}
# Part of the core → what of the core it may not import, where that list is shorter.
MAY_NOT_IMPORT: dict[str, set[str]] = {
    "cli": set(),
    "__main__": set(),
    "integrations": {"cli"},
    "bench": {"server", "cli"},
    "explain": {"server", "cli"},
}
# Folder of the server → what else of the server it may import. The APIs meet in what they share, not in each other.
BASICS = {"error_texts", "options"}
SHARED_BY_APIS = BASICS | {"generation", "host", "http", "requests"}
SERVER_MAY_IMPORT: dict[str, set[str]] = {
    "http": BASICS,
    "requests": BASICS | {"host", "http"},
    "structured": BASICS | {"host", "http", "requests"},
    "generation": BASICS | {"host", "http", "requests", "structured"},
    "anthropic": SHARED_BY_APIS | {"structured"},
    "openai": SHARED_BY_APIS,
    "openai.chat": SHARED_BY_APIS | {"structured", "openai"},
    "openai.completions": SHARED_BY_APIS | {"structured", "openai"},
    "openai.responses": SHARED_BY_APIS | {"structured", "openai"},
    # The page of the API describes the bodies of all of them.
    "web": {"requests", "anthropic", "openai", "openai.chat", "openai.completions", "openai.responses"},
}
# Where kernels ask for an instruction. None of these features chooses a tile: measured tiles are in hardware/tiles.
FEATURES_ASKED: dict[str, set[str]] = {
    "attention/paged.py": {"MMA_BF16", "PDL"},
    "dense/fragments.py": {"MMA_BF16", "MX_MMA", "TCGEN05"},
    "dense/small_batch.py": {"PDL"},
    "dense/triton_bf16.py": {"MMA_BF16"},
    "moe/grouped.py": {"MX_MMA", "TCGEN05", "WGMMA"},
    "moe/paths.py": {"MX_MMA", "TCGEN05", "WGMMA"},
    "moe/small_batch.py": {"PDL"},
    "moe/bf16_activations.py": {"MMA_BF16"},
    "moe/narrow_activations.py": {"WGMMA"},
    "recurrent/gated_delta.py": {"MMA_BF16", "PDL"},
    "sampling/blocked.py": {"MMA_BF16"},
    "small/fused.py": {"MMA_BF16", "PDL"},
}
# The registries of families and formats, and the reader of draft heads, whose files name the family of their layers.
MAY_NAME_FAMILIES = {
    "models/families.py",
    "models/known_checkpoints.py",
    "text/formats.py",
    "models/draft_heads/config_file.py",
}
# The oracle, and the bound layers that hand it an implementation's list of paths.
MAY_READ_PATHS = {"planning/paths.py", "planning/bound.py"}

Violation = tuple[int, str]


@dataclass(frozen=True)
class Source:
    """One file of the core: its path below `src/microscale`, its text and its syntax tree."""

    place: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.place)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def part(self) -> str:
        """The top-level folder or module that the file belongs to, or what has rules of its own within one."""
        for part in ("kernels.compiling", "server.model_files"):
            if self.place.startswith(part.replace(".", "/")):
                return part
        return self.place.split("/")[0].removesuffix(".py")

    @property
    def is_jit(self) -> bool:
        return self.place.endswith("_jit.py")

    @cached_property
    def prose(self) -> set[int]:
        """Identities of the nodes that are texts for people: docstrings, and `help=`."""
        statements = [node.value for node in self.nodes if isinstance(node, ast.Expr)]
        texts = {id(value) for value in statements if isinstance(value, ast.Constant)}
        for node in self.nodes:
            if isinstance(node, ast.keyword) and node.arg == "help":
                texts |= {id(inner) for inner in ast.walk(node.value)}
        return texts

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Line and dotted name of everything imported; `from a import b` counts as `a.b`."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                found += [(node.lineno, f"{'.' * node.level}{node.module or ''}.{a.name}") for a in node.names]
            elif isinstance(node, ast.Import):
                found += [(node.lineno, a.name) for a in node.names]
        return found

    @property
    def core_imports(self) -> list[tuple[int, str]]:
        """Imports of the core, without the leading `microscale.`."""
        return [(line, n.removeprefix("microscale.")) for line, n in self.imports if n.startswith("microscale.")]


def _admits(rules: set[str], name: str) -> bool:
    return any(f"{name}.".startswith(f"{rule}.") for rule in rules)


# ---- imports ---------------------------------------------------------------------------------------------------------


def imports_point_down(source: Source) -> Iterator[Violation]:
    if source.part not in MAY_IMPORT and source.part not in MAY_NOT_IMPORT:
        yield 1, f"{source.part} is missing from the import table; add it there and to docs/architecture.md"
        return
    for line, name in source.imports:
        if name.startswith("."):
            yield line, "relative import; write the whole name"
    for line, name in source.core_imports:
        if _admits({source.part}, name):
            continue
        if source.part in MAY_NOT_IMPORT:
            wrong = _admits(MAY_NOT_IMPORT[source.part], name)
        else:
            wrong = not _admits(MAY_IMPORT[source.part], name)
        if wrong:
            yield line, f"{source.part} may not import {name}"


def _server_folder(name: str) -> str:
    """The folder, or the loose module, that a dotted name below `microscale.server` belongs to."""
    folders = sorted(SERVER_MAY_IMPORT, reverse=True)
    return next((f for f in folders if f"{name}.".startswith(f"{f}.")), name.split(".")[0])


def server_imports_point_down(source: Source) -> Iterator[Violation]:
    folder = _server_folder(source.place.removeprefix("server/").replace("/", "."))
    if source.part != "server" or folder not in SERVER_MAY_IMPORT:
        return
    for line, name in source.core_imports:
        if name.startswith("server."):
            target = _server_folder(name.removeprefix("server."))
            if target not in SERVER_MAY_IMPORT[folder] | {folder}:
                yield line, f"server/{folder} may not import server/{target}"


def imports_are_at_the_top(source: Source) -> Iterator[Violation]:
    """A command imports what it runs inside its function, so that its `--help` is quick."""
    if source.part == "cli":
        return
    for function in source.nodes:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield node.lineno, "import inside a function; move it to the top of the file"


# ---- where knowledge lives -------------------------------------------------------------------------------------------

# sm90, SM_120, compute_90a, hopper … Products (rtx5090) and parts of words (canada) do not match.
ARCHITECTURE = re.compile(
    r"\b(?:sm_?\d{2,3}[a-z]?|compute_\d{2,3}[a-z]?|ampere|hopper|blackwell|lovelace)\b|get_device_capability",
    re.IGNORECASE,
)
HINT = re.compile(r"sm|compute_|ampere|hopper|blackwell|lovelace|capability", re.IGNORECASE)


def _words(node: ast.AST) -> Iterator[str]:
    """Identifiers and texts of one node."""
    match node:
        case ast.Constant(value=str(word)) | ast.Name(id=word) | ast.Attribute(attr=word):
            yield word
        case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word) | ast.ClassDef(name=word):
            yield word
        case ast.keyword(arg=str(word)) | ast.arg(arg=word) | ast.ImportFrom(module=str(word)):
            yield word
        case ast.alias(name=word, asname=other):
            yield f"{word} {other or ''}"


def _names_architecture(word: str) -> bool:
    if not HINT.search(word):
        return False
    if re.search(r"\b(?:sm|compute)_$", word):  # the beginning of f"sm_{…}"
        return True
    return any(ARCHITECTURE.search(part) for part in (*re.split(r"(?<=[a-z0-9])_(?=[a-z])", word), word))


def _computes_with_capability(node: ast.AST) -> bool:
    """Arithmetic or comparison on an SM or a capability, its major or minor part, or a target with a literal SM."""
    if isinstance(node, ast.Attribute) and node.attr in ("major", "minor"):
        return not ast.unparse(node.value).startswith(("self", "sys.version_info"))
    if isinstance(node, ast.Compare | ast.BinOp):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.left, node.right]
        names = [next(_words(side.func if isinstance(side, ast.Call) else side), "") for side in sides]
        return any(name == "sm" or name.endswith("capability") for name in names)
    if isinstance(node, ast.Call) and _name_of(node) == "GPUTarget":
        return any(isinstance(arg, ast.Constant) and isinstance(arg.value, int) for arg in node.args[:2])
    return False


def gpu_knowledge_lives_in_hardware(source: Source) -> Iterator[Violation]:
    if source.part == "hardware":
        return
    for node in source.nodes:
        # A module of Triton may be called hopper; importing it decides nothing.
        if id(node) in source.prose or isinstance(node, ast.alias | ast.ImportFrom):
            continue
        if any(map(_names_architecture, _words(node))) or _computes_with_capability(node):
            yield getattr(node, "lineno", 1), f"names an architecture ({ast.unparse(node)[:60]}); ask for a Feature"


# Folders that belong to a model family or a chat format, by the name up to its first digit: gpt_oss, gemma, harmony …
OWN_FOLDERS = [
    path.parent.relative_to(CORE).as_posix()
    for path in (*CORE.glob("models/*/model.py"), *CORE.glob("text/*/format.py"))
]
FAMILY = re.compile(
    "|".join(re.sub(r"\d.*", "", f.split("/")[1]).replace("_", "[-_ ]?") for f in OWN_FOLDERS) or "$^", re.IGNORECASE
)
PRESET = re.compile(r"\b(?:gpt-oss|gemma-4|qwen3)-(?:tiny|\d+b)[\w-]*")
"""Names that users type. They may occur in texts."""


def families_are_named_in_their_folders(source: Source) -> Iterator[Violation]:
    own = source.part == "integrations" or any(source.place.startswith(f"{f}/") for f in OWN_FOLDERS)
    if own or source.place in MAY_NAME_FAMILIES:
        return
    for node in source.nodes:
        if id(node) not in source.prose:
            for word in _words(node):
                if FAMILY.search(PRESET.sub("", word)):
                    yield (
                        getattr(node, "lineno", 1),
                        f"names a model family ({word[:50]}); ask its record or ChatFormat",
                    )


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv"}


def only_settings_reads_the_environment(source: Source) -> Iterator[Violation]:
    if source.part == "settings":
        return
    for node in source.nodes:
        named = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
        taken = isinstance(node, ast.ImportFrom) and node.module == "os" and ENVIRONMENT & {a.name for a in node.names}
        if named or taken:
            yield getattr(node, "lineno", 1), "reads the environment; settings.py is the place"


# ---- kernels ---------------------------------------------------------------------------------------------------------


def only_jit_files_are_hidden_from_mypy(source: Source) -> Iterator[Violation]:
    marked = re.search(r"^# mypy: ignore-errors$", source.text, re.MULTILINE)
    if bool(marked) != source.is_jit:
        yield 1, "`# mypy: ignore-errors` is for files named *_jit.py, and each of them has it"


def _jit_names(source: Source) -> set[str]:
    """Names under which a file knows jit modules (`small_batch_jit`, `… as jit`) or their functions."""
    names = set()
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom):
            of_jit = (node.module or "").endswith("_jit")
            names |= {a.asname or a.name for a in node.names if of_jit or a.name.endswith("_jit")}
        elif isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            names.add(node.name)
    return names


def kernels_start_through_launch(source: Source) -> Iterator[Violation]:
    """No `kernel[grid](…)`, and none of Triton's own methods on a jit function: nothing would record such a launch."""
    if source.place == "kernels/launch.py" or source.is_jit:
        return
    known = _jit_names(source)

    def is_jit(node: ast.AST) -> bool:
        named = isinstance(node, ast.Name) and node.id in known
        return named or (isinstance(node, ast.Attribute) and is_jit(node.value))

    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Subscript):
            # Outside of kernels/ a table of functions looks the same.
            wrong = source.part == "kernels" or is_jit(called.value)
        else:
            by_grid = any(keyword.arg in ("grid", "warmup") for keyword in node.keywords)
            wrong = isinstance(called, ast.Attribute) and called.attr in ("run", "warmup", "preload")
            wrong = wrong and (by_grid or is_jit(called))
        if wrong:
            yield node.lineno, f"{ast.unparse(called)} starts a kernel past kernels/launch.py"


# What the size of a batch, what its requests ask for, or the card is called in code that starts kernels.
BATCH = re.compile(
    r"\b(tokens|pairs|sequences|max_query_len|longest_query|context_lens|page_table|num_experts)\b"
    r"|\b(batch|features|draws|filters|adjusts|biases|top_logprobs|temperature|history|allowed)\b"
    r"|\.shape\b|\.numel\(|\bgpu\b|\blen\("
)
EMPTY = re.compile(r"^(not )?[\w.]*(tokens|rows|shape\[0\])$|^[\w.]+ == 0$")
"""`if not tokens`: an empty batch starts nothing."""


def _name_of(call: ast.Call) -> str:
    """The name that is called, without what is before the dot."""
    return next(_words(call.func), "")


def _launching(source: Source) -> set[str]:
    """Names of functions that start a kernel: `launch` itself, and those that call one of these."""
    functions = [node for node in source.nodes if isinstance(node, ast.FunctionDef)]
    calls = {f.name: {_name_of(c) for c in ast.walk(f) if isinstance(c, ast.Call)} for f in functions}
    starting = {"launch"}
    while more := {name for name, called in calls.items() if called & starting} - starting:
        starting |= more
    return starting


def _given_to_paths(source: Source) -> set[str]:
    """Names of functions that are handed to a path: `MoePath("…", because, supports, start)`."""
    names: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Call) and node.args and _name_of(node).endswith("Path"):
            names |= {inner.id for inner in ast.walk(node.args[-1]) if isinstance(inner, ast.Name)}
    return names


def _chooses(node: ast.If | ast.IfExp, called: set[str] | None) -> bool:
    """Whether a branch asks the batch or the card, and calls something (of these names) in one of its arms."""
    test = ast.unparse(node.test)
    if not BATCH.search(test) or EMPTY.match(test):
        return False
    arms = [*node.body, *node.orelse] if isinstance(node, ast.If) else [node.body, node.orelse]
    calls = [c for arm in arms if not isinstance(arm, ast.Raise) for c in ast.walk(arm) if isinstance(c, ast.Call)]
    # A function that returns before the kernel is started chooses as well.
    leaves = called is not None and any(isinstance(arm, ast.Return) for arm in arms)
    return leaves or any(called is None or _name_of(call) in called for call in calls)


def kernels_do_not_choose_their_path(source: Source) -> Iterator[Violation]:
    """A function that runs (`run…`, a path's `start`) asks neither the batch nor the card what to call; one that starts
    kernels, by itself or through another of its file, does not ask them which; none returns `None` for "not here"."""
    if source.part != "kernels" or source.is_jit:
        return
    starts, launching = _given_to_paths(source), _launching(source)
    for function in source.nodes:
        if not isinstance(function, ast.FunctionDef):
            continue
        runs = function.name.lstrip("_").startswith("run") or function.name in starts
        if not runs and function.name not in launching:
            continue
        advice = "make each way a Path, and the oracle picks"
        if runs and re.search(r"\b(Tensor|Logits) \| None", ast.unparse(function.returns or ast.Constant(0))):
            yield function.lineno, f"{function.name} may return None; {advice}"
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.IfExp) and _chooses(node, None if runs else launching):
                yield node.lineno, f"{function.name} chooses by {ast.unparse(node.test)}; {advice}"
            elif runs and isinstance(node, ast.Match):
                yield node.lineno, f"{function.name} chooses by {ast.unparse(node.subject)}; {advice}"


def _path_lists() -> set[str]:
    """`PATH_LISTS` of planning/paths.py: the attributes of an implementation that list its paths."""
    for node in ast.parse((CORE / "planning/paths.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PATH_LISTS":
            return set(ast.literal_eval(node.value))
    raise SystemExit("planning/paths.py has no PATH_LISTS")


PATH_LISTS = _path_lists()


def only_the_oracle_reads_paths(source: Source) -> Iterator[Violation]:
    if source.part == "hardware" or source.place in MAY_READ_PATHS:
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in PATH_LISTS and isinstance(node.ctx, ast.Load):
            yield node.lineno, f"{ast.unparse(node)} reads an implementation's paths; ask planning/paths.py"


TILE_PARTS = {"block_m", "block_n", "block_k", "warps_n", "slices", "ahead", "registers", "row_tiles", "stages"}


def kernels_make_no_tiles(source: Source) -> Iterator[Violation]:
    if source.part != "kernels":
        return
    for node in source.nodes:
        if isinstance(node, ast.Call):
            called = _name_of(node)
            changes = called == "replace" and TILE_PARTS & {keyword.arg for keyword in node.keywords}
            if called in ("Tile", "SplitKv") or changes:
                yield node.lineno, f"{ast.unparse(node)[:60]} makes a tile; hardware/tiles is the place"


def kernels_ask_for_listed_features(source: Source) -> Iterator[Violation]:
    if source.part != "kernels":
        return
    asked = {
        node.attr
        for node in source.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Feature"
    }
    listed = FEATURES_ASKED.get(source.place.removeprefix("kernels/"), set())
    if asked != listed:
        yield 1, f"asks for the features {sorted(asked)}, and the table of instructions lists {sorted(listed)}"


WAIT = "triton.language.extra.cuda.gdc_wait"


def _called(source: Source, node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of every function that a node of a jit file calls by its plain name."""
    module = f"microscale.{source.place.removesuffix('.py').replace('/', '.')}"
    full = {name.rpartition(".")[2]: name for _, name in source.imports}
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            yield call.lineno, full.get(call.func.id, f"{module}.{call.func.id}")


def _waiting_functions() -> set[str]:
    """``gdc_wait``, and the jit functions that call it, directly or not."""
    callees: dict[str, set[str]] = {}
    for path in CORE.rglob("kernels/**/*_jit.py"):
        source = Source(path.relative_to(CORE).as_posix(), path.read_text())
        module = f"microscale.{source.place.removesuffix('.py').replace('/', '.')}"
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef):
                callees[f"{module}.{node.name}"] = {name for _, name in _called(source, node)}
    waiting, before = {WAIT}, 0
    while len(waiting) > before:
        before = len(waiting)
        waiting |= {name for name, called in callees.items() if called & waiting}
    return waiting


WAITING_FUNCTIONS = _waiting_functions()


def kernels_wait_outside_of_loops(source: Source) -> Iterator[Violation]:
    """Triton 3.7.1 moves the loads of a pipelined loop above a ``gdc_wait`` inside of it (SM 9.0)."""
    if not source.is_jit:
        return
    for loop in source.nodes:
        if isinstance(loop, ast.For | ast.While):
            for line, name in _called(source, loop):
                if name in WAITING_FUNCTIONS:
                    yield line, f"{name.rpartition('.')[2]} calls gdc_wait, and a loop may not; wait before it"


RULES: tuple[Callable[[Source], Iterator[Violation]], ...] = (
    imports_point_down,
    server_imports_point_down,
    imports_are_at_the_top,
    gpu_knowledge_lives_in_hardware,
    families_are_named_in_their_folders,
    only_settings_reads_the_environment,
    only_jit_files_are_hidden_from_mypy,
    kernels_start_through_launch,
    kernels_do_not_choose_their_path,
    only_the_oracle_reads_paths,
    kernels_make_no_tiles,
    kernels_ask_for_listed_features,
    kernels_wait_outside_of_loops,
)


# ---- the whole tree --------------------------------------------------------------------------------------------------


HAS_NO_COST = {"drafts"}
"""Ops with one implementation: nothing is compared, so nothing is estimated."""


def _public_functions(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


def ops_are_whole() -> Iterator[str]:
    """Every op has a contract, a reference and a cost, and its tests use all of the reference."""
    for folder in sorted(path for path in (CORE / "kernels").iterdir() if (path / "spec.py").exists()):
        needed = ("reference.py",) if folder.name in HAS_NO_COST else ("reference.py", "cost.py")
        missing = [name for name in needed if not (folder / name).exists()]
        if missing:
            yield f"kernels/{folder.name} lacks {', '.join(missing)}"
            continue
        tests = (ROOT / "tests" / "kernels").glob(f"test_{folder.name}*.py")
        used = {name for path in tests for name in re.findall(r"\w+", path.read_text())}
        if unused := _public_functions(folder / "reference.py") - used:
            yield f"tests/kernels/test_{folder.name}*.py do not use the reference's {sorted(unused)}"


def violations(source: Source) -> list[str]:
    """What one file does against the rules."""
    wrong = {(line, message) for rule in RULES for line, message in rule(source)}
    return [f"{source.place}:{line}: {message}" for line, message in sorted(wrong)]


def main() -> int:
    paths = sorted(CORE.rglob("*.py"))
    found = [line for path in paths for line in violations(Source(path.relative_to(CORE).as_posix(), path.read_text()))]
    found = [f"src/microscale/{line}" for line in found] + list(ops_are_whole())
    print("\n".join([*found, f"{len(paths)} files, {len(RULES)} rules: {len(found)} violations"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
