"""The one binary: `baltoro VERB ...`. A verb names a function, imported when the verb is used.

A verb's function is an ordinary typed one. Its parameters before the `*` that have no default are
positional, the others become `--options`, and its docstring is the help. What a user got wrong
(`ValueError`, `OSError`) is one line on stderr and exit code 2, an interrupt is 130; anything else
is our mistake and shows its traceback, as `--debug` does for every error.
"""

import importlib
import inspect
import json
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence

from baltoro import __version__
from baltoro.config import nearest

Verb = Callable[..., int | None]  # an exit code, or None for 0

# verb -> (module:function, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "doctor": ("baltoro.doctor:doctor", "what this machine offers and what will run on it"),
    "inspect": ("baltoro.checkpoint.inspect:inspect", "what a checkpoint or preset consists of"),
    "generate": ("baltoro.serve.generate:generate", "continue a prompt"),
    "chat": ("baltoro.serve.chat:chat", "talk with a model in the terminal"),
    "serve": ("baltoro.serve.server:serve", "serve a model with OpenAI's HTTP protocol"),
    "convert": ("baltoro.checkpoint.convert:convert", "write a checkpoint in another format"),
    "data": ("baltoro.data.cli:data", "build or check training data"),
    "train": ("baltoro.recipes.pretrain:train", "pretrain a model of a size on a data folder"),
    "report": ("baltoro.train.report:report", "what a run did, as one HTML page"),
    "recipes": ("baltoro.recipes.pretrain:recipes", "what each size of the ladder fixes"),
    "compare": ("baltoro.recipes.compare:compare", "put published directions to the test"),
    "bench": ("baltoro.ops.tune:bench", "measure launch shapes of kernels on this GPU"),
    "fixture": ("baltoro.checkpoint.fixture:fixture", "a tiny random checkpoint for tests"),
    "sandbox": ("baltoro.sandbox.cli:main", "install, test and use sandboxes"),
}

# verbs whose modules need packages that a plain installation leaves out
EXTRAS = {"serve": "serve"}

USAGE = """\
usage: baltoro VERB [ARGUMENTS] [--option VALUE ...]
       baltoro VERB --help

The open K3 stack: train, post-train, quantise and serve a Kimi-K3-shaped model.

verbs:
{verbs}

options:
  -h, --help   show this text, or the help of a verb
  --version    show the version
  --debug      show the traceback of an error
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code.

    `argv` holds the arguments without the program's name; absent, they are taken from `sys.argv`.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        code = _dispatch(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        if is_debug:
            raise
        print("baltoro: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader left, as `head` does; the interpreter must not flush into the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if is_debug:
            raise
        print(f"baltoro: {_one_line(error)}", file=sys.stderr)
        return 2
    return code


def load_verb(verb: str) -> Verb:
    """Import and return the function behind `verb`, a key of `VERBS`.

    Raises `ValueError`, with the command that helps, if a package of its extra is not installed.
    """
    name, _, function = VERBS[verb][0].partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if verb not in EXTRAS or str(error.name).partition(".")[0] == "baltoro":
            raise
        raise ValueError(
            f"{verb}: needs the package {error.name}; install it with "
            f"`pip install 'baltoro[{EXTRAS[verb]}]'`"
        ) from error
    return typing.cast(Verb, getattr(module, function))


def _dispatch(args: list[str]) -> int:
    if not args:
        raise ValueError(f"a verb is needed, one of: {', '.join(VERBS)}; see `baltoro --help`")
    if args[0] in ("-h", "--help"):
        print(_usage(), end="")
    elif args[0] == "--version":
        print(f"baltoro {__version__}")
    elif args[0] in VERBS:
        verb, options, fixed = load_verb(args[0]), args[1:], {}
        parameters = inspect.signature(verb).parameters
        if "argv" in parameters:
            # it has verbs of its own and reads them itself
            return verb(options) or 0
        # tyro is loaded on use: the machine with the GPU runs tests without it
        import tyro

        if "overrides" in parameters:
            options, overrides = split_overrides(options)
            fixed = {"overrides": overrides}
        function = _with_positional(verb, fixed)
        # options of a record are as flat as the others
        config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
        tyro.cli(function, prog=f"baltoro {args[0]}", args=options, config=config)
    else:
        raise ValueError(f"{args[0]}: unknown verb; {nearest(args[0], VERBS)}")
    return 0


def split_overrides(args: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """Options whose name holds a dot, `--path.to.field value`, apart from the others.

    Values are read as JSON where they are JSON, else as text. Raises `ValueError` for one without
    a value, or given twice.
    """
    rest: list[str] = []
    overrides: dict[str, object] = {}
    pending = list(args)
    while pending:
        arg = pending.pop(0)
        path, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or "." not in path:
            rest.append(arg)
            continue
        if not equals:
            if not pending:
                raise ValueError(f"{arg}: needs a value")
            value = pending.pop(0)
        if path in overrides:
            raise ValueError(f"{arg}: is given twice")
        try:
            overrides[path] = json.loads(value)
        except json.JSONDecodeError:
            overrides[path] = value
    return rest, overrides


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}   {text}" for verb, (_, text) in VERBS.items()]
    return USAGE.format(verbs="\n".join(lines))


def _with_positional(function: Verb, fixed: Mapping[str, object]) -> Verb:
    """`function` with the signature that tyro reads as `VERB ARGUMENT --option VALUE`.

    Parameters of `fixed` are no options; they have the values it gives.
    """
    import tyro

    hints = typing.get_type_hints(function, include_extras=True)
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if name in fixed:
            continue
        if (
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and parameter.default is parameter.empty
        ):
            parameter = parameter.replace(kind=parameter.POSITIONAL_ONLY)
            hint = typing.Annotated[hint, tyro.conf.arg(metavar=name.upper())]
        parameters.append(parameter.replace(annotation=hint))

    def run(*args: object, **kwargs: object) -> None:
        function(*args, **kwargs, **fixed)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
