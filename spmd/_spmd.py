"""`spmd`: the decorator that runs a function on every rank of a mesh."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

from . import _dropped, _trace
from ._nested import call_in_run, check_results, cut_here, declared_aux, declared_like, join_here
from .checkpoint import fingerprint
from .kernels.arguments import check_function
from .kernels.callsite import public
from .kernels.errors import MeshError, SpecError
from .kernels.torch_private import is_traced
from .mesh import trees
from .mesh.calling import Callee, HasRefs, call
from .mesh.display.notebook import shorten
from .mesh.mesh import Mesh, resolve
from .mesh.program import Program
from .mesh.put import check_specs, specs_for
from .mesh.region import Region, current
from .mesh.remote.regions import on_ranks
from .mesh.replication.values import Check
from .mesh.request import Request
from .mesh.run_state import RunState
from .mesh.spec import REPLICATED, P, is_sharded, is_spec
from .transforms import Transformable, in_gradient, parallel_step

CHECKS = ("first", "always", "never")


if TYPE_CHECKING:  # typing would keep them, and with them this module, beyond the end of the program

    @overload
    def spmd(
        f: Callable[..., Any],
        *,
        mesh: Mesh | None = None,
        in_specs: Any = None,
        out_specs: Any = None,
        donate: str | Sequence[str] = (),
        check: str = "first",
    ) -> Callable[..., Any]: ...
    @overload
    def spmd(
        f: None = None,
        *,
        mesh: Mesh | None = None,
        in_specs: Any = None,
        out_specs: Any = None,
        donate: str | Sequence[str] = (),
        check: str = "first",
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


@public
def spmd(
    f: Callable | None = None,
    *,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    donate: str | Sequence[str] = (),
    check: str = "first",
) -> Any:
    """Run `f` on every rank of a mesh, each on its own shards.

    >>> with Mesh({"data": 2}) as mesh:
    ...     total = spmd(lambda x: psum(x.sum(), "data"), in_specs=P("data"), mesh=mesh)
    ...     float(total(torch.arange(4.0)))
    6.0

    Args:
        f: a pure function of trees; inside it, tensors are this rank's local ones. Works bare and with arguments.
        mesh: None is the enclosing or default mesh, looked up at each call.
        in_specs: how the arguments are cut: one P for all, a tuple with a prefix tree for each positional argument, or
            a dict by argument name. None (everywhere the default): Arrays as they are, other tensors replicated.
        out_specs: how results form global values, a prefix tree; None is replicated.
        donate: names of arguments whose memory the results may reuse, such as parameters and optimizer state; the
            Arrays passed can't be read afterwards, not even if the call fails.
        check: when to check that results without a spec are the same on all ranks. "first": the first call of each
            signature follows what each tensor is computed from; values are compared, too: numbers on every call,
            other tensors on calls 1, 2, 4, 8 and so on (on launched ranks arguments as well). "always": compare all
            values on every call, and wait for it. "never": no check. See docs/replication.md.

    Returns:
        A function of the same arguments, whose tensors come back as `Array`.

    Raises:
        SpecError: a spec does not fit; a result differs between ranks; `f` would write to its arguments or to tensors
            that it captures (a module's, say, by `backward()` or by a torch optimizer's step). Whatever `f` raises on a
            rank is raised with its own type.
    """
    if f is None:
        return functools.partial(spmd, mesh=mesh, in_specs=in_specs, out_specs=out_specs, donate=donate, check=check)
    return Spmd(f, mesh, in_specs, out_specs, donate, check)


class Spmd(Transformable):
    """What `spmd` returns: call it like the function it wraps."""

    def __init__(
        self, f: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any, donate: str | Sequence[str], check: str
    ):
        check_function("spmd", f, "@spmd above def step(params, batch), or spmd(step, mesh=mesh)")
        functools.update_wrapper(self, f)
        self._f, self._mesh, self._in_specs, self._out_specs = f, mesh, in_specs, out_specs
        self._name = _name_of(f)
        self._signature = _signature_of(f)
        several = isinstance(donate, Iterable) and not isinstance(donate, str)
        self._donate: tuple[Any, ...] = () if donate is None else tuple(donate) if several else (donate,)
        self._check = check
        for name in self._donate:
            if not isinstance(name, str) or name not in self._signature.parameters:
                raise SpecError(
                    f"spmd got a bad donate for {self._name}",
                    got=repr(name),
                    expected=f"one of ({', '.join(self._signature.parameters)})",
                )
        if not isinstance(check, str) or check not in CHECKS:
            raise SpecError("spmd got a bad check", got=repr(check), expected=f"one of {CHECKS}")
        for what, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
            check_specs(specs, f"spmd got bad {what} for {self._name}", "P(...) or None as leaves")
        self._parallel = parallel_step(f)
        self.program = Program(f, out_specs, self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced() and current() is None:
            raise SpecError(
                f"torch.compile was given {self._name}, an @spmd function, or calls it",
                remedy="compile what is inside: value_and_grad(torch.compile(loss_fn)), torch.compile(apply)",
            )
        if current() is not None:
            return self._inside(self._bound(args, kwargs))
        turns = RunState.turns
        try:
            return self._outside(args, kwargs)
        except BaseException as error:
            RunState.turns = turns  # it has used no results of other calls
            shorten(error)
            raise

    def _bound(self, args: tuple, kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            return self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise shorten(TypeError(f"{self._name}() {error}")) from None

    def named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by the names of their parameters."""
        return self._bound(args, kwargs).arguments

    def _outside(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        mesh = resolve(self._mesh)
        if kwargs:  # so that an argument has the same place in every call, however it is passed
            bound = self._bound(args, kwargs)
            args, kwargs = bound.args, bound.kwargs
        parallel = self._parallel
        if fingerprint.unplaced.restored or self not in mesh.run_state.begun:
            fingerprint.begin_step(mesh, self, self._name, None if parallel is None else parallel.settings)
        try:
            # Made anew, since one that it held would hold it, and keep its program on the ranks.
            callee = Callee(self.program, self._f, self.request, self._check, self, bool(self._donate))
            results = call(mesh, callee, (args, kwargs))
        except HasRefs:
            args, kwargs = on_ranks(mesh, (args, kwargs))
            return self._outside(args, kwargs)
        if parallel is not None and self not in _dropped.used:
            _dropped.look(self, parallel.batch.name, (args, kwargs), results, quiet=mesh.rank not in (None, 0))
        if _trace.ON:
            _trace.note(self._name, results, None if parallel is None else parallel.settings)
        return results

    def request(self, mesh: Mesh, args: tuple, kwargs: dict[str, Any]) -> Request:
        """The arguments of a call, checked."""
        bound = self._bound(args, kwargs)
        donated = [key for name in self._donate for key in self._keys(bound, name)]
        batch = None if self._parallel is None else self._parallel.batch
        wanted = Request(mesh, self._name, bound.args, bound.kwargs, self._specs(bound), batch, donated)
        for spec in trees.leaves(self._out_specs, is_leaf=is_spec):
            if spec is not None:
                mesh.layout.check(spec, where=f"out_specs of {self._name}")
        return wanted

    def _keys(self, bound: inspect.BoundArguments, name: str) -> list[int | str]:
        """The positions or keywords under which an argument was passed."""
        kind = self._signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            return list(bound.arguments.get(name, ()))
        if name in bound.kwargs:
            return [name]
        positions = enumerate(self._positional_names(len(bound.args)))
        return [position for position, its_name in positions if its_name == name]

    def _specs(self, bound: inspect.BoundArguments) -> Any:
        """in_specs as a prefix of (args, kwargs)."""
        specs = self._in_specs
        args, kwargs = bound.args, bound.kwargs
        if specs is None or isinstance(specs, P):
            return specs
        if isinstance(specs, dict):
            names = [*self._positional_names(len(args)), *kwargs]
            anything = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
            for name in specs:
                if name not in self._signature.parameters and not anything:
                    raise SpecError(
                        f"in_specs of {self._name} name an unknown argument",
                        got=repr(name),
                        expected=f"of ({', '.join(self._signature.parameters)})",
                    )
            found = [specs.get(name) for name in names]
            return tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :], strict=True))
        specs = tuple(specs)
        if len(specs) < len(args) or (len(specs) > len(self._signature.parameters) and not self._variadic()):
            raise SpecError(
                f"in_specs of {self._name} do not fit its arguments",
                got=f"{len(specs)} specs for {len(args)} positional arguments",
                remedy="give one entry per positional argument, or a dict by argument name",
            )
        rest = dict(zip(self._signature.parameters, specs, strict=False))
        return specs[: len(args)], {name: rest.get(name) for name in kwargs}

    def _variadic(self) -> bool:
        return any(p.kind is p.VAR_POSITIONAL for p in self._signature.parameters.values())

    def _positional_names(self, count: int) -> list[str]:
        names: list[str] = []
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                names.extend([parameter.name] * (count - len(names)))
            elif len(names) < count:
                names.append(parameter.name)
        return names

    def _inside(self, bound: inspect.BoundArguments) -> Any:
        """A call within a region: cut the arguments, run the body on this rank's parts, and join the results.

        If an argument is already cut along an axis, the caller works on shards there as well: nothing is cut or joined
        along that axis.
        """
        region = current()
        assert region is not None
        if self._mesh is not None and region.mesh is not None and not self._mesh.same_as(region.mesh):
            raise SpecError(
                f"{self._name} is bound to another mesh than the region that calls it",
                got=repr(self._mesh),
                expected=repr(region.mesh),
                remedy="leave mesh= out where one @spmd function calls another",
            )
        if not region.pure and region.session.layout.size > 1:  # a rank's part might be taken for the whole result
            region.session.check_together(f"call {self._name}, an @spmd function")
            if region.by_some:
                problem = f"a function that mesh.run calls on some ranks cannot call {self._name}, an @spmd function"
                remedy = "leave ranks= out, or call in it what @spmd wraps"
                raise MeshError(problem, where=region.session.where(), remedy=remedy)
            tree = (bound.args, bound.kwargs)
            return call_in_run(
                self._name, self._f, tree, region, self._check, lambda looked: self._cut(bound, region, looked)
            )
        return self._cut(bound, region, Check.NOTHING)

    def _cut(self, bound: inspect.BoundArguments, region: Region, looked: Check) -> Any:
        tree = (bound.args, bound.kwargs)
        specs = self._specs(bound)
        shared: set[str] = set()
        if specs is not None:
            leaves, treedef = trees.flatten(tree)
            for index, (leaf, spec) in enumerate(
                zip(leaves, specs_for(specs, tree, f"in_specs of {self._name}"), strict=True)
            ):
                if spec is not None and spec.entries:
                    part = cut_here(leaf, spec, region, self._name)
                    shared |= spec.axes if part is leaf else set()
                    leaves[index] = part
            tree = trees.unflatten(treedef, leaves)
        result = self._joined(self._f(*tree[0], **tree[1]), shared)
        if looked and not shared and not in_gradient():  # there a value is its mean over the ranks
            check_results(self._name, result, region, looked)
        return result

    def _joined(self, result: Any, shared: set[str]) -> Any:
        """Results as the caller, within a region, sees them: whole along the axes that this call cut."""

        declared: list[bool] = []

        def strip(node: Any) -> Any:
            local = node.local if is_sharded(node) else node
            declared.extend([is_sharded(node)] * len(trees.leaves(local)))
            return trees.map(lambda leaf: join_here(leaf, node.spec, shared), local) if is_sharded(node) else node

        result = trees.map(strip, result, is_leaf=is_sharded)
        if self._out_specs is None:
            return result
        leaves, treedef = trees.flatten(result)
        specs = specs_for(self._out_specs, result, f"out_specs of {self._name}")
        for index, (leaf, spec, known) in enumerate(zip(leaves, specs, declared, strict=True)):
            if spec is not None and not known:
                leaves[index] = join_here(leaf, spec, shared)
        return trees.unflatten(treedef, leaves)

    def transformed(self, transform: Callable, argnums: Any, with_value: bool, has_aux: bool) -> Spmd:
        """`grad` of this is the spmd function of the grad; gradients have their arguments' specs."""
        inner = transform(self._f if isinstance(self._f, Transformable) or not has_aux else self._with_aux_declared())
        chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)

        @functools.wraps(self._f)
        def body(*args: Any, **kwargs: Any) -> Any:
            out = inner(*args, **kwargs)
            gradients = out[1] if with_value else out[0] if has_aux else out
            several = (gradients,) if isinstance(argnums, int) else gradients
            several = tuple(
                declared_like(gradient, args[number]) for number, gradient in zip(chosen, several, strict=True)
            )
            gradients = several[0] if isinstance(argnums, int) else several
            return (out[0], gradients) if with_value else (gradients, out[1]) if has_aux else gradients

        return Spmd(body, self._mesh, self._in_specs, REPLICATED, (), self._check)

    def _with_aux_declared(self) -> Callable:
        @functools.wraps(self._f)
        def body(*args: Any, **kwargs: Any) -> Any:
            return declared_aux(self._f(*args, **kwargs), self._out_specs, f"out_specs of {self._name}")

        return body

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: bound to its object, like any function."""
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"spmd({self._name})"


def _name_of(f: Any) -> str:
    while isinstance(f, functools.partial):
        f = f.func
    return getattr(f, "__name__", type(f).__name__)


def _signature_of(f: Callable) -> inspect.Signature:
    try:
        return inspect.signature(f)
    except ValueError:  # a built-in function that does not tell
        return inspect.signature(lambda *args, **kwargs: None)
