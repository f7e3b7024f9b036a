"""What trials of ways by parts at some sizes tell of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import device_of
from hybridremat.graph.costs.workspace_fits import WorkspaceFit
from hybridremat.graph.rewrites.by_parts import OTHER_BITS, Parts, sites_of, workspaces
from hybridremat.graph.rewrites.trial import Trial, Way
from hybridremat.graph.tracing.trace import TracedStep


@dataclass
class KnownParts:
    """What is known of a way by parts from other sizes.

    ``same``: whether it has the same bits, None if that depends on the size; ``takes``: its workspace, for
    the elements of its largest part.
    """

    same: bool | None
    takes: WorkspaceFit | None = None


def note_known(step: TracedStep, store: KernelStore, known: Mapping[int, Mapping[str, KnownParts]]) -> None:
    """Note in a store what is known of ways by parts from other sizes, before they are tried.

    Of those that compute each element alike in any parts (``PartedKernel.largest``) the bits are known: what
    they take is measured until a fit is, and over an input they take what they do over nothing. All others
    are tried anew.

    Parameters
    ----------
    known
        For each op, by the name of a way, what is known; fits are compared with what is measured.
    """
    trials, asked = [], dict[str, tuple[Parts, KnownParts, int]]()
    for site in sites_of(step):
        for form in site.forms:
            seen = known.get(site.op.id, {}).get(form.kernel.run.__name__)
            if seen is None or seen.same is None or form.name in asked:
                continue
            if not seen.same:
                store.by_parts[form.name] = OTHER_BITS
                continue
            elements = form.elements(site.node)
            asked[form.name] = form, seen, elements
            if seen.takes is not None and seen.takes.known:
                store.by_parts[form.name] = seen.takes.at(elements)
            elif form.name not in store.by_parts:
                way = Way(form.name, form.kernel.form(form.parts), exact=False)
                trials.append(Trial(site.node, (way,)))
    store.by_parts.update(workspaces(trials, device_of(step.op_nodes)) if trials else {})
    for name, (form, seen, elements) in asked.items():
        takes = store.by_parts[name]
        if takes == OTHER_BITS:  # where it was tried for its bits: it is tried at all sizes from now on
            seen.same = None
            continue
        if seen.takes is not None:
            seen.takes.compare(takes, elements)
        store.by_parts.update(dict.fromkeys(form.over, takes))


def known_parts(step: TracedStep, store: KernelStore) -> dict[int, dict[str, KnownParts]]:
    """What the trials of a step tell of its ways by parts at other sizes: for each op, by the way's name.

    Of those over inputs all have to have the same bits, and to take what they do over nothing.
    """
    found: dict[int, dict[str, KnownParts]] = {}
    for site in sites_of(step):
        for form in site.forms:
            tried = [store.by_parts[name] for name in (form.name, *form.over) if name in store.by_parts]
            differ = len(set(tried)) > 1 and tried[0] != OTHER_BITS
            if form.kernel.largest is None or not tried or differ:
                continue
            fit = None
            if tried[0] != OTHER_BITS:
                fit = WorkspaceFit.of(tried[0], form.elements(site.node))
            parts = KnownParts(tried[0] != OTHER_BITS, fit)
            found.setdefault(site.op.id, {})[form.kernel.run.__name__] = parts
    return found
