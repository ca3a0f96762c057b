"""The rules of the design that a syntax tree can show: who imports whom, and where knowledge may live."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from microscale.backends.paths import PATH_LISTS
from microscale.models.families import PRESETS

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "microscale"
TESTS = ROOT / "tests"

FILES = sorted(SRC.rglob("*.py"))

# module → what of ours it may import. A more specific entry (models → backends.ops) admits just that module.
MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "settings": {"errors"},
    "hardware": {"errors"},
    "formats": {"errors"},
    "text": {"errors", "settings"},
    "kernels": {"formats", "hardware", "errors"},
    "compiling": {"kernels.launch", "errors"},
    "backends": {"kernels", "formats", "hardware", "settings", "errors"},
    "models": {"backends.ops", "backends.recording_ops", "formats", "parallel.sharding", "errors"},
    "parallel": {"errors"},
    "engine": {"models", "backends", "compiling", "parallel", "hardware", "settings", "errors", "version"},
    "server": {"engine", "text", "settings", "errors", "version"},
    "prove": {"models", "kernels", "compiling", "backends", "formats", "hardware", "errors"},
    "doctor": {"hardware", "errors", "version"},
    "__init__": {"version"},
}
# module → what of ours it may not import, where that is shorter to say.
MAY_NOT_IMPORT: dict[str, set[str]] = {
    "cli": set(),
    "__main__": set(),
    "integrations": {"cli"},
    "bench": {"server", "cli"},
    "explain": {"server", "cli"},
    "quality": {"server", "cli"},
}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def owner(path: Path) -> str:
    """The top-level module that a file belongs to."""
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every import of ours: line and dotted name below ``microscale``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            module = node.module or ""
            if module == "microscale":
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif module.startswith("microscale."):
                below = module.removeprefix("microscale.")
                # `from microscale.backends import ops` imports backends.ops as much as the dotted form does.
                yield from ((node.lineno, f"{below}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("microscale."):
                    yield node.lineno, alias.name.removeprefix("microscale.")


def allowed(target: str, rules: set[str]) -> bool:
    parts = target.split(".")
    return any(parts[: len(rule.split("."))] == rule.split(".") for rule in rules)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_follow_the_table(path: Path) -> None:
    module = owner(path)
    found = [(line, target) for line, target in imports(tree_of(path)) if target.split(".")[0] != module]
    if module in MAY_NOT_IMPORT:
        wrong = [entry for entry in found if allowed(entry[1], MAY_NOT_IMPORT[module])]
    else:
        assert module in MAY_IMPORT, f"{module} is not in the table of the design: add it there and here"
        wrong = [entry for entry in found if not allowed(entry[1], MAY_IMPORT[module])]
    assert not wrong, f"{path.relative_to(ROOT)} imports against the design: {wrong}"


# A folder of the server → what else of the server it may import. The APIs meet in what they share, not in each other.
SHARED = {
    "choice",
    "encoding",
    "engine_requests",
    "generation",
    "host",
    "http",
    "limits",
    "prompts",
    "reading",
    "requests",
}
SERVER_MAY_IMPORT: dict[str, set[str]] = {
    "http": {"limits"},
    "requests": {"http"},
    "structured": {"host", "http", "limits", "requests"},
    "web": set(),
    "anthropic": SHARED | {"structured"},
    "openai": SHARED,
    "openai.chat": SHARED | {"structured", "openai"},
    "openai.completions": SHARED | {"structured", "openai"},
    "openai.responses": SHARED | {"structured", "openai"},
}


def server_folder(name: str) -> str:
    """The folder, or the module of the root, that a dotted name below ``microscale.server`` belongs to."""
    return next(
        (f for f in sorted(SERVER_MAY_IMPORT, reverse=True) if f"{name}.".startswith(f"{f}.")), name.split(".")[0]
    )


@pytest.mark.parametrize("folder", SERVER_MAY_IMPORT)
def test_folders_of_the_server_point_down(folder: str) -> None:
    server = SRC / "server"
    paths = [p for p in server.rglob("*.py") if server_folder(".".join(p.relative_to(server).parts)) == folder]
    assert paths, f"server/{folder} has no modules: take it from the table"
    found = {
        (str(path.relative_to(server)), line, target)
        for path in paths
        for line, name in imports(tree_of(path))
        if name.startswith("server.")
        and (target := server_folder(name.removeprefix("server."))) not in SERVER_MAY_IMPORT[folder] | {folder}
    }
    assert not found, f"server/{folder} imports against the design: {sorted(found)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_stand_at_the_top(path: Path) -> None:
    tree = tree_of(path)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not inner, f"{path.relative_to(ROOT)} imports inside a function at lines {inner}"


# Names of architectures: sm90, SM_120, compute_90a, hopper … Products (rtx5090) and word parts (canada) do not match.
ARCHITECTURE = re.compile(
    r"\b(?:sm_?\d{2,3}[a-z]?|compute_\d{2,3}[a-z]?|ampere|hopper|blackwell|lovelace)\b|get_device_capability",
    re.IGNORECASE,
)


def docstrings(tree: ast.Module) -> set[int]:
    """Identities of the string nodes that are prose: a string that stands as a statement."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def names_architecture(node: ast.AST) -> str | None:
    """The word of this node that names an architecture, if one does."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        word = node.value
        if re.search(r"\b(?:sm|compute)_$", word):  # the beginning of f"sm_{…}"
            return word
    elif isinstance(node, ast.Name):
        word = node.id
    elif isinstance(node, ast.Attribute):
        word = node.attr
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        word = node.name
    elif isinstance(node, ast.keyword | ast.arg) and node.arg:
        word = node.arg
    else:
        return None
    parts = (*re.split(r"(?<=[a-z0-9])_(?=[a-z])", word), word)
    return word if any(ARCHITECTURE.search(part) for part in parts) else None


def uses_capability(node: ast.AST) -> bool:
    """Arithmetic or comparison on an SM or a capability, its major or minor part, or a target with a literal SM."""
    if isinstance(node, ast.Attribute) and node.attr in ("major", "minor"):
        return not ast.unparse(node.value).startswith(("self", "sys.version_info"))
    if isinstance(node, ast.Compare | ast.BinOp):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.left, node.right]
        return any(re.search(r"\bsm$|capability(\(.*\))?$", ast.unparse(side)) for side in sides)
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("GPUTarget"):
        return any(isinstance(arg, ast.Constant) and isinstance(arg.value, int) for arg in node.args[:2])
    return False


def gpu_knowledge(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Code (not prose, not comments, not Triton's own module names) that knows an architecture or a capability."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        if id(node) in prose:
            continue
        word = names_architecture(node)
        if word is not None or uses_capability(node):
            yield getattr(node, "lineno", 0), word or ast.unparse(node)


OUTSIDE_HARDWARE = [path for path in FILES if owner(path) != "hardware"]


@pytest.mark.parametrize("path", OUTSIDE_HARDWARE, ids=lambda p: str(p.relative_to(SRC)))
def test_gpu_knowledge_lives_in_hardware(path: Path) -> None:
    found = list(gpu_knowledge(tree_of(path)))
    assert not found, f"{path.relative_to(ROOT)} names an architecture: {found}; ask for a Feature instead"


@pytest.mark.parametrize(
    "code",
    [
        "x = torch.cuda.get_device_capability()",
        "if props.major >= 10: pass",
        "p = f(); p.major >= 9",
        "gpu.sm >= 90",
        "gpu.sm in (120, 121)",
        "x = gpu.sm // 10",
        "capability >= (10, 0)",
        "if device_capability() == (9, 0): pass",
        "name = f'sm_{gpu}'",
        "GPUTarget('cuda', 90, 32)",
        "arch = 'sm_120'",
        "arch = 'sm90a'",
        "def is_hopper(): pass",
        "f(arch_sm120=True)",
        "target = f'compute_{1}' + 'compute_90'",
    ],
)
def test_gpu_knowledge_is_seen(code: str) -> None:
    assert list(gpu_knowledge(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "'''Runs on SM90.'''",
        "x = 1  # SM120",
        "num_sms = 132",
        "family = 'small'",
        "self.major = 1",
        "smem = 'sm'",
        "Row(sm=task.sm)",
        "GPUTarget('cuda', sm, 32)",
    ],
)
def test_innocent_code_passes(code: str) -> None:
    assert not list(gpu_knowledge(ast.parse(code)))


# Folders that are a model family's or a chat format's own. A new one is found by itself.
OWN_FOLDERS = [path.parent for path in (*SRC.glob("models/*/family.py"), *SRC.glob("text/*/format.py"))]
# By name: harmony, Gemma4Config, gpt_oss … The folder's name up to its first digit. A preset's name is a user's word.
FAMILY = re.compile(
    "|".join(re.sub(r"\d.*", "", folder.name).replace("_", "[-_ ]?") for folder in OWN_FOLDERS), re.IGNORECASE
)
PRESET = re.compile("|".join(map(re.escape, sorted(PRESETS, key=len, reverse=True))))
# The two registries, which list them, the plug-ins, which meet other programs' names, and the reader of draft heads,
# whose files say by such a name what their layers are.
MAY_NAME_FAMILIES = {"models/families.py", "text/formats.py", "models/draft_heads/config_file.py"}


def names_in(node: ast.AST) -> Iterator[str]:
    """Identifiers and texts of one node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield PRESET.sub("", node.value)
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.keyword | ast.arg):
        yield node.arg or ""
    elif isinstance(node, ast.alias):
        yield f"{node.name} {node.asname or ''}"
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""


def families_named(tree: ast.Module) -> list[tuple[int, str]]:
    """Code (not prose, not help texts) that knows a model family or a chat format by name."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help":
            prose |= {id(inner) for inner in ast.walk(node.value)}
    return [
        (getattr(node, "lineno", 0), name)
        for node in ast.walk(tree)
        if id(node) not in prose
        for name in names_in(node)
        if FAMILY.search(name)
    ]


OF_NO_FAMILY = [
    path
    for path in FILES
    if path.relative_to(SRC).as_posix() not in MAY_NAME_FAMILIES
    and owner(path) != "integrations"
    and not any(folder in path.parents for folder in OWN_FOLDERS)
]


@pytest.mark.parametrize("path", OF_NO_FAMILY, ids=lambda p: str(p.relative_to(SRC)))
def test_a_family_is_named_in_its_own_folder_only(path: Path) -> None:
    found = families_named(tree_of(path))
    assert not found, f"{path.relative_to(SRC)} names a model family: {found}; ask its record or its ChatFormat instead"


@pytest.mark.parametrize(
    "code",
    [
        "from microscale.text.harmony import tokens",
        "from microscale.text import gemma",
        "from microscale.text.chatml.format import ChatmlFormat",
        "import openai_harmony as library",
        "if isinstance(config, Gemma4Config): pass",
        "is_gemma = False",
        "def _gpt_oss(): pass",
        "kind = 'gpt-oss'",
        "f(harmony=True)",
        "raise BadCheckpoint(f'{path} is no file of GptOss')",
    ],
)
def test_a_family_is_seen(code: str) -> None:
    assert families_named(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "'''As Gemma has it.'''",
        "x = 1  # gpt-oss: no",
        "Argument(help='A preset (gpt-oss-120b, gemma-4 …)')",
        "name = 'gpt-oss-20b'",
        "raise BadSetting('Give a hub id such as openai/gpt-oss-20b.')",
    ],
)
def test_prose_may_name_a_family(code: str) -> None:
    assert not families_named(ast.parse(code))


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_only_settings_reads_the_environment(path: Path) -> None:
    if owner(path) == "settings":
        return
    reads = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and ENVIRONMENT & {a.name for a in node.names})
    ]
    assert not reads, f"{path.relative_to(ROOT)} reads the environment at lines {reads}; settings.py is the place"


OPS = sorted(p for p in (SRC / "kernels").iterdir() if p.is_dir() and p.name != "__pycache__")


def public_functions(path: Path) -> set[str]:
    return {n.name for n in tree_of(path).body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}


@pytest.mark.parametrize("folder", OPS, ids=lambda p: p.name)
def test_every_op_has_contract_reference_cost_and_test(folder: Path) -> None:
    for part in ("spec.py", "reference.py", "cost.py"):
        assert (folder / part).exists(), f"kernels/{folder.name} lacks {part}"
    tests = list((TESTS / "kernels").glob(f"test_{folder.name}*.py"))
    assert tests, f"tests/kernels has no test_{folder.name}*.py"
    used = {name for path in tests for name in re.findall(r"\w+", path.read_text())}
    missing = public_functions(folder / "reference.py") - used
    assert not missing, f"no test in tests/kernels/test_{folder.name}*.py uses the reference's {sorted(missing)}"


JIT_MARK = re.compile(r"^# mypy: ignore-errors$", re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_only_jit_files_are_hidden_from_mypy(path: Path) -> None:
    """A jit file holds Triton's language, says so to mypy in itself, and holds nothing else that mypy could check."""
    marked = bool(JIT_MARK.search(path.read_text()))
    jit = path.name.endswith("_jit.py")
    assert marked == jit, f"{path.relative_to(ROOT)}: `# mypy: ignore-errors` is for *_jit.py, and each of them has it"


def test_small_ops_have_a_cost_each() -> None:
    missing = public_functions(SRC / "kernels/small/reference.py") - public_functions(SRC / "kernels/small/cost.py")
    assert not missing, f"kernels/small/cost.py lacks {sorted(missing)}"


LAUNCHER = SRC / "kernels" / "launch.py"
STARTS = {"run", "warmup", "preload"}
"""Of a jit function: what starts it, or has it compiled."""


def jit_names(tree: ast.Module) -> set[str]:
    """Names under which a file knows jit modules (``small_batch_jit``, ``… as jit``) or functions of theirs."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            of_jit = (node.module or "").endswith("_jit")
            names |= {a.asname or a.name for a in node.names if of_jit or a.name.endswith("_jit")}
        elif isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            names.add(node.name)
    return names


def starts_of_kernels(tree: ast.Module, *, of_kernels: bool = True) -> Iterator[tuple[int, str]]:
    """Everything that starts a kernel by itself: ``kernel[grid](…)``, and Triton's own methods on a jit function.

    ``of_kernels``: any subscript that is called, since a kernel may go by another name; elsewhere a table of functions
    looks the same.
    """
    known = jit_names(tree)

    def is_jit(node: ast.AST) -> bool:
        return (isinstance(node, ast.Name) and node.id in known) or (
            isinstance(node, ast.Attribute) and is_jit(node.value)
        )

    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Subscript) and (of_kernels or is_jit(called.value)):
            yield node.lineno, ast.unparse(called)
        elif isinstance(called, ast.Attribute) and called.attr in STARTS:
            by_grid = any(keyword.arg in ("grid", "warmup") for keyword in node.keywords)
            if is_jit(called.value) or by_grid:
                yield node.lineno, ast.unparse(called)


# Jit functions call each other, and Gluon's layouts take their axes by subscripts.
LAUNCHING = [path for path in FILES if path != LAUNCHER and not path.stem.endswith("_jit")]


@pytest.mark.parametrize("path", LAUNCHING, ids=lambda p: str(p.relative_to(SRC)))
def test_kernels_are_started_through_the_record(path: Path) -> None:
    found = list(starts_of_kernels(tree_of(path), of_kernels=owner(path) == "kernels"))
    assert not found, f"{path.relative_to(ROOT)} starts a kernel past kernels/launch.py: {found}; nobody would prove it"


@pytest.mark.parametrize(
    "code",
    [
        "from microscale.kernels.moe import pairs_jit\npairs_jit.combine[grid](x, y, 3)",
        "from a import b_jit as jit\njit.small[(1, 2)](x, **options)",
        "from a import b_jit as jit\njit.small.run(x, grid=grid, warmup=False)",
        "from a.b_jit import small\nsmall.warmup(x, grid=(1,))",
        "attend[(programs, heads)](q, k)",
        "fn.run(*args, grid=grid, warmup=False)",
    ],
)
def test_a_launch_past_the_record_is_seen(code: str) -> None:
    assert list(starts_of_kernels(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "launch(jit.small, grid, arguments, constants, options)",
        "implementation.run(packed, spec, gpu, x)",
        "found = table[key]",
        "from a import b_jit as jit\nx = jit.SILU.value",
    ],
)
def test_other_calls_are_no_launches(code: str) -> None:
    assert not list(starts_of_kernels(ast.parse(code)))


# ---- paths: only the oracle chooses ----------------------------------------------------------------------------------

# Who looks at an implementation's paths: the oracle, and those that hand it the list to pick from.
PICKERS = {"backends/paths.py", "backends/bound.py", "backends/calls.py"}
PATH_CLASS = re.compile(r"Path\b")
# What the size of a batch, what its requests ask for, or the kind of a card goes by in code that starts kernels.
BATCH = re.compile(
    r"\b(tokens|pairs|sequences|max_query_len|longest_query|context_lens|page_table|num_experts)\b"
    r"|\b(batch|asks|draws|filters|adjusts|biases|top_logprobs|temperature|history|allowed)\b"
    r"|\.shape\b|\.numel\(|\bgpu\b|\blen\("
)
EMPTY = re.compile(r"^(not )?[\w.]*(tokens|rows|shape\[0\])$|^[\w.]+ == 0$")
"""``if not tokens``: an empty batch starts nothing."""


def path_choices(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Code of kernels that chooses among ways to run by itself.

    A function that runs (``run…``, a path's ``start``) may ask neither the batch nor the card what to call; one that
    starts kernels, itself or by another of its file, may not ask them which; none may answer ``None`` for "not here".
    """
    starts, launchers = started_by_paths(tree), launching(tree)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        runs = function.name.lstrip("_").startswith("run") or function.name in starts
        if not runs and function.name in launchers:
            for node in ast.walk(function):
                if isinstance(node, ast.If | ast.IfExp) and chooses(node, launchers):
                    yield node.lineno, f"{function.name} chooses by {ast.unparse(node.test)}"
        if not runs:
            continue
        returns = "" if function.returns is None else ast.unparse(function.returns)
        if re.search(r"\b(Tensor|Logits) \| None", returns):
            yield function.lineno, f"{function.name} may return None"
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.IfExp) and chooses(node):
                yield node.lineno, f"{function.name} chooses by {ast.unparse(node.test)}"
            elif isinstance(node, ast.Match):
                yield node.lineno, f"{function.name} chooses by {ast.unparse(node.subject)}"


def chooses(node: ast.If | ast.IfExp, called: set[str] | None = None) -> bool:
    """Whether a branch asks the batch or the card, and calls something (of these names) in one of its arms."""
    test = ast.unparse(node.test)
    if not BATCH.search(test) or EMPTY.match(test):
        return False
    arms = [*node.body, *node.orelse] if isinstance(node, ast.If) else [node.body, node.orelse]
    calls = [inner for arm in arms if not is_raise(arm) for inner in ast.walk(arm) if isinstance(inner, ast.Call)]
    # A function that returns before the kernel is started chooses as well.
    leaves = called is not None and any(isinstance(arm, ast.Return) for arm in arms)
    return leaves or any(called is None or name_of(call) in called for call in calls)


def name_of(call: ast.Call) -> str:
    """The name that a call goes by, without what stands before the dot."""
    return ast.unparse(call.func).rpartition(".")[2]


def launching(tree: ast.Module) -> set[str]:
    """Names of functions that start a kernel: ``launch`` itself, and who calls one of these."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls = {f.name: {name_of(c) for c in ast.walk(f) if isinstance(c, ast.Call)} for f in functions}
    found = {"launch"}
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return found


def is_raise(arm: ast.AST) -> bool:
    return isinstance(arm, ast.Raise)


def started_by_paths(tree: ast.Module) -> set[str]:
    """Names of functions that are handed to a path: ``MoePath("…", because, supports, start)``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and PATH_CLASS.search(ast.unparse(node.func)) and node.args:
            found |= {inner.id for inner in ast.walk(node.args[-1]) if isinstance(inner, ast.Name)}
    return found


def asks_paths(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Reads of an implementation's list of paths."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PATH_LISTS and isinstance(node.ctx, ast.Load):
            yield node.lineno, ast.unparse(node)


STARTING = [path for path in FILES if owner(path) == "kernels" and not path.stem.endswith("_jit")]
# Files of tuned tiles have paths too: those of the GEMMs that were measured.
ASKING = [path for path in FILES if owner(path) != "hardware" and path != SRC / "bench" / "tune.py"]


@pytest.mark.parametrize("path", STARTING, ids=lambda p: str(p.relative_to(SRC)))
def test_kernels_do_not_choose_their_path(path: Path) -> None:
    found = list(path_choices(tree_of(path)))
    assert not found, f"{path.relative_to(ROOT)} chooses a path: {found}; make each way a Path, and the oracle picks"


@pytest.mark.parametrize("path", ASKING, ids=lambda p: str(p.relative_to(SRC)))
def test_only_the_oracle_asks_for_paths(path: Path) -> None:
    place = path.relative_to(SRC).as_posix()
    found = [entry for entry in asks_paths(tree_of(path)) if place not in PICKERS]
    assert not found, f"{place} looks at an implementation's paths: {found}; ask backends/paths.py"


@pytest.mark.parametrize(
    "code",
    [
        "def run(packed, x):\n    if x.shape[0] <= 64:\n        return few(packed, x)\n    return many(packed, x)",
        "def run(packed, x, gpu):\n    return wgmma(x) if gpu.has(Feature.WGMMA) else grouped(x)",
        "def run_short(self):\n    if self.sequences > 8:\n        self._merge()",
        "def run(batch):\n    match batch.max_query_len:\n        case 1: decode()",
        "def run_fused(self, q) -> Tensor | None: ...",
        "def _go(x, tokens):\n    if tokens > 16:\n        launch(a)\nGEMM = DensePath('GEMM', LAST, always, _go)",
        "def _go(way, x, tokens):\n    if tokens > 16: launch(a)\nP = AttentionPath('a', 'b', c, partial(_go, way))",
        # By what requests ask for, and in a function that a path's start calls.
        "def run(self, batch):\n    weights = job.weigh(x) if batch.draws else None",
        "def weigh(self):\n    launch(a)\ndef finish(self):\n    if self.batch.draws:\n        self.weigh()",
        "def add_bias(self):\n    if self.batch is None or self.batch.bias is None:\n        return\n    launch(a)",
        "def finish(self):\n    top = self.top(x) if self.top_logprobs else None\ndef top(self, x):\n    launch(a)",
    ],
)
def test_a_choice_of_path_is_seen(code: str) -> None:
    assert list(path_choices(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "def run(packed, x, tokens):\n    if not tokens:\n        return y\n    launch(a)",
        "def run(x, residual):\n    return y if residual is None else add(y, residual)",
        "def run_short(self, way):\n    if way is Split.MERGE:\n        self._merge()",
        "def run(x):\n    if x.shape[1] % 32:\n        raise Unsupported(f'{name(x)}')",
        "def choose(tokens):\n    return tile(1) if tokens > 8 else tile(2)",
        "def gate_up(x, tokens):\n    tile = few(x) if tokens > 8 else many(x)\n    launch(jit, tile)",
        "def top(self):\n    if self.rows:\n        launch(a)",
    ],
)
def test_other_branches_choose_no_path(code: str) -> None:
    assert not list(path_choices(ast.parse(code)))


def test_a_look_at_paths_is_seen() -> None:
    assert list(asks_paths(ast.parse("path = next(p for p in entry.paths if p.supports(spec, gpu) is None)")))
    assert list(asks_paths(ast.parse("TritonW8A16().mlp_paths[0].start(packed)")))


# Where kernels ask for an instruction, by feature. None of these chooses a tile: what was measured on a card stands in
# ``hardware/tiles``, and a family that has the instruction need not have been measured.
INSTRUCTIONS: dict[str, set[str]] = {
    "attention/paged.py": {"MMA_BF16", "PDL"},
    "dense/fragments.py": {"MMA_BF16", "MX_MMA", "TCGEN05"},
    "dense/small_batch.py": {"PDL"},
    "dense/triton_bf16.py": {"MMA_BF16"},
    # Which operand of the matrix unit stands in registers, and the block-scaled instruction that is promised.
    "moe/grouped.py": {"MX_MMA", "TCGEN05", "WGMMA"},
    "moe/paths.py": {"MX_MMA", "TCGEN05", "WGMMA"},
    "moe/small_batch.py": {"PDL"},
    "moe/w4a16.py": {"MMA_BF16"},
    "moe/w4a8.py": {"WGMMA"},
    "sampling/blocked.py": {"MMA_BF16"},
    "small/fused.py": {"MMA_BF16", "PDL"},
}


def features_asked(tree: ast.Module) -> set[str]:
    """``Feature.X`` of a file."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Feature"
    }


def test_kernels_ask_for_features_where_an_instruction_is_meant() -> None:
    kernels = SRC / "kernels"
    found = {
        path.relative_to(kernels).as_posix(): asked
        for path in sorted(kernels.rglob("*.py"))
        if (asked := features_asked(tree_of(path)))
    }
    assert found == INSTRUCTIONS, "a Feature says what a card can do, not which tile it was measured with"


TILE_TYPES = {"Tile", "SplitKv"}
TILE_PARTS = {"block_m", "block_n", "block_k", "warps_n", "slices", "ahead", "registers", "row_tiles", "stages"}


def tiles_made(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Everything that makes a tile or changes one: only ``hardware`` may, kernels ask for theirs."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        changes = called == "replace" and TILE_PARTS & {keyword.arg for keyword in node.keywords}
        if called in TILE_TYPES or changes:
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("path", [path for path in FILES if owner(path) == "kernels"], ids=lambda p: p.stem)
def test_kernels_make_no_tiles(path: Path) -> None:
    found = list(tiles_made(tree_of(path)))
    assert not found, f"{path.relative_to(ROOT)} makes a tile: {found}; hardware/tiles is the place"


@pytest.mark.parametrize("code", ["Tile(16, 64, 4, 3)", "tiles.Tile(*sizes)", "replace(tile, registers=168)"])
def test_a_tile_that_is_made_is_seen(code: str) -> None:
    assert list(tiles_made(ast.parse(code)))


def test_report_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """A report, not a rule: what has grown beyond what the style calls small."""
    long_files = [(len(p.read_text().splitlines()), p) for p in FILES]
    functions = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path.relative_to(SRC)}:{node.lineno} {node.name}")
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert functions
    with capsys.disabled():
        for lines, path in sorted(long_files, reverse=True):
            if lines > (400 if "kernels" in path.parts else 300):
                print(f"\nlong file: {path.relative_to(SRC)}, {lines} lines")
        for lines, name in sorted(functions, reverse=True):
            if lines > (150 if "_jit.py" in name else 50):
                print(f"\nlong function: {name}, {lines} lines")
