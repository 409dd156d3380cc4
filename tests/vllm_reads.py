"""What the connector package reads of vLLM, found by following vLLM's objects through its source.

Our code takes vLLM's objects as `Any`. Here each `Any` gets the class that it has (`ROOTS`), or is named as something
else (`NOT_VLLM`); from there types are followed through attributes, loops, calls and our own fields, by vLLM's own
annotations. What can't be followed is a problem, never silence: a read that nobody looked at could break without
notice. One pass per function, in the order of the source; branches are not told apart.

Used by: vllm_interface.py.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from vllm_classes import (
    OPAQUE,
    UNKNOWN,
    Bound,
    ClassObject,
    Function,
    Instance,
    Items,
    Module,
    Opaque,
    Parts,
    Type,
    Unknown,
    is_vllm,
    locate,
    member_of,
    path_of,
    returned_by,
)

SPEC = "vllm.v1.kv_cache_interface:KVCacheSpec"
ROOTS = {
    "_outer_transfer": "vllm.config.kv_transfer:KVTransferConfig",
    "_request_of": "vllm.v1.request:Request",
    "block_pool": "vllm.v1.core.block_pool:BlockPool",
    "blocks": "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
    "cache": "vllm.config.cache:CacheConfig",
    "connector_output": "vllm.v1.outputs:KVConnectorOutput",
    "forward_context": "vllm.forward_context:ForwardContext",
    "group": "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
    "kv_cache_config": "vllm.v1.kv_cache_interface:KVCacheConfig",
    "kv_cache_manager": "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "load_config": "vllm.config.load:LoadConfig",
    "model": "vllm.config.model:ModelConfig",
    "model_config": "vllm.config.model:ModelConfig",
    "multimodal": "vllm.config.multimodal:MultiModalConfig",
    "multimodal_facts.config": "vllm.config.multimodal:MultiModalConfig",
    "parallel": "vllm.config.parallel:ParallelConfig",
    "request": "vllm.v1.request:Request",
    "request_of": "vllm.v1.request:Request",
    "scheduler_output": "vllm.v1.core.sched.output:SchedulerOutput",
    "spec": SPEC,
    "speculative": "vllm.config.speculative:SpeculativeConfig",
    "transfer": "vllm.config.kv_transfer:KVTransferConfig",
    "vllm_config": "vllm.config.vllm:VllmConfig",
}
"""Classes of what our code takes as `Any`, by the name of the parameter or field, by function and parameter, or, for
what a function of ours or a parameter that is one returns, by its name."""

NOT_VLLM = {
    "_canonical": "JSON values",
    "_canonical.value": "JSON values",
    "__getattr__": "our own class",
    "attn_metadata": "not looked at",
    "_complain.error": "a number or name of CUDA's",
    "client": "our own client, or a fake of it",
    "hf_config": "transformers' configuration",
    "kv_layer": "a tensor",
    "kwargs": "not looked at",
    "layers": "tensors",
    "metric_types": "passed on to vLLM",
    "params": "JSON of a request",
    "reports": "our own metadata, told from other connectors' by its class",
    "submit_once.arguments": "of our own functions",
}
"""What else is `Any` in our code, by the same kinds of names, and what it is."""

HINTS: dict[str, Type] = {
    # dict[str, Any] in vLLM; every attention-like layer enters itself there.
    "vllm.config.compilation:CompilationConfig.static_forward_context": Items(
        Instance((locate("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase"),))
    ),
    "vllm.config.kv_transfer:KVTransferConfig.kv_connector_extra_config": OPAQUE,  # JSON
    # A property without annotation; transformers' configuration.
    "vllm.config.model:ModelConfig.hf_text_config": OPAQUE,
}
"""Types that vLLM does not annotate."""

TORCH_ALONE = ("cuda_device.py",)
"""Modules of ours in which `Any` is torch's, since vLLM gives them tensors only. They may not import vLLM."""

JSON_MAPPINGS = ("dict[str, Any]", "Mapping[str, Any]")
MAPPING_VALUES = ("get", "pop", "setdefault")
PASSING_ON = ("sorted", "list", "tuple", "set", "frozenset", "iter", "reversed")


@dataclass
class Reads:
    """What was found. Keys of `members` are "module:Class.name", of `imports` "module:name"."""

    members: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    imports: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Super:
    """What `super()` gives in one of our classes."""

    bases: tuple[type, ...]


@dataclass
class Own:
    """A class of ours, and what its `self` holds of vLLM's."""

    bases: tuple[type, ...]
    defined: set[str]
    holds: dict[str, Type] = field(default_factory=dict)


def find_reads(sources: Mapping[str, str], accepted_specs: Sequence[type]) -> Reads:
    """Follow vLLM's objects through our modules, given by name. `accepted_specs` stand for vLLM's base class of specs.

    Two passes: the first learns what our classes are and hold, the second looks at the reads with that in mind.
    """
    package = _Package(tuple(accepted_specs))
    reads = Reads()
    for _ in range(2):
        reads = Reads()
        for name, source in sorted(sources.items()):
            tree = ast.parse(source)
            if name in TORCH_ALONE:
                reads.problems += [f"{name} imports vLLM"] if "vllm" in _packages_of(tree) else []
                continue
            _Scope(_File(name, package, reads), {}, "", None).run(tree.body)
    return reads


@dataclass
class _Package:
    """What is known of our classes."""

    accepted_specs: tuple[type, ...]
    owns: dict[tuple[str, str], Own] = field(default_factory=dict)
    """By module and name."""
    fields: dict[str, Type] = field(default_factory=dict)
    """Fields of our objects that hold something of vLLM's, whatever the class."""
    returns: dict[str, Type] = field(default_factory=dict)
    """What our functions return of vLLM's."""


class _File:
    """One module of ours, in one pass."""

    def __init__(self, name: str, package: _Package, reads: Reads) -> None:
        self.name = name
        self.package = package
        self._reads = reads

    def problem(self, node: ast.AST, text: str) -> None:
        self._reads.problems.append(f"{self._place(node)}: {text}")

    def read_import(self, node: ast.AST, module: str, name: str) -> None:
        self._reads.imports[f"{module}:{name}"].add(self._place(node))

    def read_member(self, node: ast.AST, classes: Sequence[type], name: str) -> Type | None:
        """Note a read; what vLLM's class does not have may be what our subclass of it adds."""
        if name.startswith("__"):
            return OPAQUE
        if classes == (locate(SPEC),):
            classes = self.package.accepted_specs
        found = [(cls, member) for cls in classes if (member := member_of(cls, name))]
        if not found:
            owns = [own for own in self.package.owns.values() if set(own.bases) & set(classes)]
            if any(name in own.defined for own in owns):
                return None
            names = ", ".join(cls.__name__ for cls in classes)
            self.problem(node, f"{names} has no {name}")
            return UNKNOWN
        result: Type | None = None
        for cls, member in found:
            key = f"{path_of(cls)}.{name}"
            self._reads.members[key].add(self._place(node))
            result = HINTS.get(key, member.type)
        return result

    def declared(self, function: str, name: str) -> Type | None:
        """Type of something that our code calls `Any`."""
        for key in (f"{function}.{name}", name):
            if key in ROOTS:
                return Instance((locate(ROOTS[key]),))
            if key in NOT_VLLM:
                return None
        return UNKNOWN

    def _place(self, node: ast.AST) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 0)}"


class _Scope:
    """Names of one function, comprehension or module."""

    def __init__(self, file: _File, names: dict[str, Any], function: str, own: Own | None) -> None:
        self._file = file
        self._names = names
        self._function = function
        self._own = own

    def run(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    # ---- statements

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.ClassDef():
                self._class(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define(node)
            case ast.Assign():
                value = self.value(node.value)
                for target in node.targets:
                    self._bind(target, value, node.value)
            case ast.AnnAssign():
                self._annotated(node)
            case ast.For():
                self._bind(node.target, _item_of(self.value(node.iter)), node.iter)
                self.run([*node.body, *node.orelse])
            case ast.With():
                for item in node.items:
                    value = self.value(item.context_expr)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, value, item.context_expr)
                self.run(node.body)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.stmt):
                        self._statement(child)
                    elif isinstance(child, ast.expr):
                        self.value(child)
                    elif isinstance(child, ast.ExceptHandler | ast.match_case):
                        self.run(child.body)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.Import):
                if alias.name.split(".")[0] == "vllm":
                    self._names[name.split(".")[0]] = Module(importlib.import_module("vllm"))
            elif node.module and node.module.split(".")[0] == "vllm":
                self._file.read_import(node, node.module, alias.name)
                self._names[name] = _imported(node.module, alias.name)

    def _class(self, node: ast.ClassDef) -> None:
        bases = [self.value(base) for base in node.bases]
        vllm_bases = tuple(base.cls for base in bases if isinstance(base, ClassObject))
        own = self._file.package.owns.setdefault(
            (self._file.name, node.name), Own(vllm_bases, _names_defined_in(node))
        )
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                if _mentions_any(item.annotation):
                    self._declare(item, node.name, item.target.id, own)
            elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                _Scope(self._file, self._names, "", own)._define(item)

    def _declare(self, node: ast.AST, function: str, name: str, own: Own) -> None:
        kind = self._file.declared(function, name)
        if isinstance(kind, Unknown):
            self._file.problem(node, f"{name} is Any: say in ROOTS or NOT_VLLM what it is")
        elif kind is not None:
            own.holds[name] = kind
            self._file.package.fields[name] = kind

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        names = dict(self._names)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        for argument in every:
            names.pop(argument.arg, None)
            if argument.annotation is None:
                continue
            if _mentions_any(argument.annotation):
                kind = self._file.declared(node.name, argument.arg)
                if isinstance(kind, Unknown):
                    self._file.problem(
                        node,
                        f"{node.name}({argument.arg}) is Any: say in ROOTS or NOT_VLLM what it is",
                    )
                is_function = ast.unparse(argument.annotation).startswith("Callable[")
                names[argument.arg] = Bound(kind) if is_function and kind is not None else kind
            else:
                names[argument.arg] = self._annotation(argument.annotation)
        if node.returns is not None and _mentions_any(node.returns):
            kind = self._file.declared("", node.name)
            if isinstance(kind, Unknown):
                self._file.problem(
                    node, f"{node.name} returns Any: say in ROOTS or NOT_VLLM what it is"
                )
            elif kind is not None:
                self._file.package.returns[node.name] = kind
        if self._own is not None and every and every[0].arg == "self":
            names["self"] = self._own
        for default in [*arguments.defaults, *arguments.kw_defaults]:
            if default is not None:
                self.value(default)
        _Scope(self._file, names, node.name, self._own).run(node.body)

    def _annotated(self, node: ast.AnnAssign) -> None:
        value = self.value(node.value) if node.value is not None else None
        if value is None and not _mentions_any(node.annotation):
            value = self._annotation(node.annotation)
        self._bind(node.target, value, node.value)
        # A container of Any is what is put into it later; `_bind` learns that.
        if (
            isinstance(node.target, ast.Attribute)
            and self._own is not None
            and _mentions_any(node.annotation)
        ):
            self._own.holds.setdefault(node.target.attr, Items(UNKNOWN))

    def _annotation(self, annotation: ast.expr) -> Type | None:
        """Type of an annotation of ours: only names that were imported from vLLM count."""
        match annotation:
            case ast.Name():
                found = self._names.get(annotation.id)
                return Instance((found.cls,)) if isinstance(found, ClassObject) else None
            case ast.BinOp():
                return self._annotation(annotation.left) or self._annotation(annotation.right)
            case ast.Subscript():
                parts = annotation.slice
                every = parts.elts if isinstance(parts, ast.Tuple) else [parts]
                last = self._annotation(every[-1])
                return Items(last) if last is not None else None
        return None

    def _bind(self, target: ast.expr, value: Any, source: ast.expr | None) -> None:
        match target:
            case ast.Name():
                self._names[target.id] = (
                    value if value is not None else _constants(source, self._names)
                )
            case ast.Tuple() | ast.List():
                parts: Sequence[Any] = [None] * len(target.elts)
                if isinstance(value, Parts) and len(value.parts) == len(target.elts):
                    parts = value.parts
                elif isinstance(value, Items | Unknown | Opaque):
                    parts = [_item_of(value)] * len(target.elts)
                for element, part in zip(target.elts, parts, strict=True):
                    self._bind(element, part, None)
            case ast.Attribute(value=ast.Name(id="self")) if self._own is not None:
                self._check_base_field(target)
                if isinstance(value, Unknown):
                    self._file.problem(target, f"self.{target.attr} is set to something unknown")
                elif value is not None and not isinstance(value, Own | Super | str | tuple):
                    self._own.holds[target.attr] = value
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=name)) if (
                self._own is not None
            ):
                held = self._own.holds.get(name)
                if value is not None and (held is None or held == Items(UNKNOWN)):
                    self._own.holds[name] = Items(value)
            case _:
                self.value(target)

    def _check_base_field(self, target: ast.Attribute) -> None:
        """A field that vLLM's base class has too."""
        assert self._own is not None
        for base in self._own.bases:
            if member_of(base, target.attr):
                self._file.read_member(target, (base,), target.attr)

    # ---- expressions

    def value(self, node: ast.expr) -> Any:
        """Type of an expression, noting the reads in it. None: nothing of vLLM's."""
        match node:
            case ast.Name():
                return self._names.get(node.id)
            case ast.Attribute():
                return self._attribute(node, self.value(node.value), node.attr)
            case ast.Call():
                return self._call(node)
            case ast.Subscript():
                held = self.value(node.value)
                self.value(node.slice)
                if isinstance(held, Parts) and isinstance(node.slice, ast.Constant):
                    place = node.slice.value
                    return held.parts[place] if isinstance(place, int) else None
                if isinstance(held, Items):
                    return held if isinstance(node.slice, ast.Slice) else held.item
                return _item_of(held)
            case ast.Tuple():
                parts = tuple(self.value(e) for e in node.elts)
                return Parts(parts) if any(p is not None for p in parts) else None
            case ast.List() | ast.Set():
                found = [self.value(e) for e in node.elts]
                return next((Items(f) for f in found if f is not None), None)
            case ast.Starred() | ast.Await():
                return self.value(node.value)
            case ast.NamedExpr():
                value = self.value(node.value)
                self._bind(node.target, value, node.value)
                return value
            case ast.BoolOp() | ast.IfExp():
                options = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
                if isinstance(node, ast.IfExp):
                    self.value(node.test)
                return next((v for v in [self.value(o) for o in options] if v is not None), None)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                item = self._inside(node.generators).value(node.elt)
                return Items(item) if item is not None else None
            case ast.DictComp():
                scope = self._inside(node.generators)
                scope.value(node.key)
                item = scope.value(node.value)
                return Items(item) if item is not None else None
            case ast.Lambda():
                _Scope(self._file, dict(self._names), self._function, self._own).value(node.body)
                return None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return None

    def _inside(self, generators: Sequence[ast.comprehension]) -> _Scope:
        scope = _Scope(self._file, dict(self._names), self._function, self._own)
        for generator in generators:
            scope._bind(generator.target, _item_of(scope.value(generator.iter)), generator.iter)
            for condition in generator.ifs:
                scope.value(condition)
        return scope

    def _attribute(self, node: ast.AST, held: Any, name: str) -> Any:
        match held:
            case Instance():
                return self._file.read_member(node, held.classes, name)
            case ClassObject():
                return self._file.read_member(node, (held.cls,), name)
            case Super():
                found = self._file.read_member(node, held.bases, name)
                return found if isinstance(found, Bound) else Bound(None)
            case Module():
                return self._of_module(node, held.module, name)
            case Own():
                if name in held.holds:
                    return held.holds[name]
                if name in self._file.package.returns:
                    return Bound(self._file.package.returns[name])
                if name not in held.defined and held.bases:
                    return self._file.read_member(node, held.bases, name)
                return None
            case Unknown():
                self._file.problem(
                    node, f"{ast.unparse(node)}: it is not known what this is read from"
                )
                return UNKNOWN
            case Opaque() | Bound():
                return OPAQUE
        return self._file.package.fields.get(name)

    def _of_module(self, node: ast.AST, module: ModuleType, name: str) -> Any:
        value = getattr(module, name, None)
        if isinstance(value, ModuleType):
            return Module(value)
        self._file.read_import(node, module.__name__, name)
        return _imported(module.__name__, name)

    def _call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in ("getattr", "hasattr") and name not in self._names:
            return self._get_attribute(node)
        if name == "super" and self._own is not None:
            return Super(self._own.bases) if self._own.bases else None
        called = self.value(node.func)
        arguments = [self.value(a) for a in node.args]
        for keyword in node.keywords:
            self.value(keyword.value)
        if called is None and name in self._file.package.returns:
            return self._file.package.returns[name]
        if hasattr(builtins, name) and called is None:
            return _built_in(name, arguments)
        match called:
            case Function():
                return returned_by(called)
            case Bound():
                return called.returns
            case ClassObject():
                for keyword in node.keywords:
                    if keyword.arg is not None:
                        self._file.read_member(node, (called.cls,), keyword.arg)
                return Instance((called.cls,))
        if isinstance(node.func, ast.Attribute):
            return _of_container(self.value(node.func.value), node.func.attr)
        return OPAQUE if isinstance(called, Opaque) else None

    def _get_attribute(self, node: ast.Call) -> Any:
        held = self.value(node.args[0])
        for default in node.args[2:]:
            self.value(default)
        if held is None or isinstance(held, Opaque | Own):
            return None
        names = _constants(node.args[1], self._names)
        if names is None:
            self._file.problem(node, f"{ast.unparse(node)}: the name of the attribute is not known")
            return UNKNOWN
        found = [
            self._attribute(node, held, n) for n in ([names] if isinstance(names, str) else names)
        ]
        return found[0] if len(found) == 1 else OPAQUE


def _imported(module: str, name: str) -> Any:
    value = getattr(importlib.import_module(module), name)
    if isinstance(value, ModuleType):
        return Module(value)
    if isinstance(value, type):
        return ClassObject(value) if is_vllm(value) else OPAQUE
    if callable(value) and hasattr(value, "__code__"):
        return Function(module, name)
    return Instance((type(value),)) if is_vllm(type(value)) else OPAQUE


def _item_of(value: Any) -> Any:
    match value:
        case Items():
            return value.key if value.key is not None else value.item
        case Parts():
            return next((p for p in value.parts if p is not None), None)
        case ClassObject():
            return Instance((value.cls,))
        case tuple():
            return value  # constants: any of them
        case Unknown() | Opaque():
            return value
    return None


def _of_container(held: Any, method: str) -> Any:
    if not isinstance(held, Items):
        return OPAQUE if isinstance(held, Opaque) else None
    if method == "items":
        return Items(Parts((held.key, held.item)))
    if method == "values":
        return Items(held.item)
    return held.item if method in MAPPING_VALUES else None


def _built_in(name: str, arguments: Sequence[Any]) -> Any:
    if name == "enumerate":
        return Items(Parts((None, _item_of(arguments[0]))))
    if name == "zip":
        return Items(Parts(tuple(_item_of(a) for a in arguments)))
    if name in PASSING_ON and arguments:
        return arguments[0]
    if name in ("next", "min", "max") and arguments:
        return _item_of(arguments[0])
    return None


def _constants(node: ast.expr | None, names: Mapping[str, Any]) -> str | tuple[str, ...] | None:
    """A text or a row of texts that an expression stands for."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Tuple | ast.List):
        values = [e.value for e in node.elts if isinstance(e, ast.Constant)]
        texts = tuple(v for v in values if isinstance(v, str))
        return texts if texts and len(texts) == len(values) else None
    found = names.get(node.id) if isinstance(node, ast.Name) else None
    return found if isinstance(found, str | tuple) else None


def _packages_of(tree: ast.Module) -> set[str]:
    """Packages that a module imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def _mentions_any(annotation: ast.expr) -> bool:
    """Whether an annotation leaves open what something is; JSON mappings don't."""
    text = ast.unparse(annotation)
    for mapping in JSON_MAPPINGS:
        text = text.replace(mapping, "JSON")
    return any(isinstance(n, ast.Name) and n.id == "Any" for n in ast.walk(ast.parse(text)))


def _names_defined_in(node: ast.ClassDef) -> set[str]:
    found = set()
    for item in ast.walk(node):
        if isinstance(item, ast.FunctionDef):
            found.add(item.name)
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
            found.add(item.attr)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found.add(item.target.id)
    return found
