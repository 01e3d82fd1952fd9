"""Mazières 1997 (SFS) and 2001 (the toolkit): a relay that adds nothing, in front of a file system."""

from collections.abc import Iterator
from functools import partial

from . import claims
from .claims import At, Claim, Sense
from .experiment import Experiment, Figure, Form, Sample, printed
from .ground import LOCAL
from .package import NAME
from .sites import SETTINGS, experiment
from .trial import Values
from .trials import TRIALS
from .workloads import MAB

TOOLKIT = "Mazières 2001 (the SFS toolkit)"
SFS = "Mazières 1997 (SFS)"

_WHERE = {
    "": "There is no NFS here: programs work on the mounts themselves, and VAN is a bind mount. ",
    "-nfs": "Server and client are Linux 6.1 in user mode, which has one processor and slow system calls. ",
}
_RELAY = (
    "The null relay is MNU, cloakfs with no policy (a FUSE daemon in Python), and, locally, bindfs (one in C). VAN is "
    "what is behind it. The paper's relay was an NFS server on the client's machine, in front of a remote one; client, "
    "relay and server are one machine here. "
)
_PLACES = {"": "locally", "-nfs": "behind NFS"}


WHY = {
    "": (
        "The paper's file was behind a network and a server, beside which what was added cannot be seen. Here it is "
        "behind one system call of a few microseconds, and each request that the kernel cannot answer from what it "
        "remembers waits until a daemon has been woken and has answered (`toolkit-latency`). "
    ),
    "-nfs": (
        "The server's kernel asks a daemon where the paper's asked itself, and user mode, in which a switch between "
        "processes and a system call take several times as long as on a machine, makes the most of that "
        "(`toolkit-latency-nfs`). "
    ),
}
"""Why what is claimed of all requests together fails."""


CONFIGURED = {
    "": "",
    "-nfs": "What configure asks of the machine is answered by a cache that it made before: starting the thousand "
    "programs that find it out takes ten times as long in user mode, and would hide what the file system costs. ",
}


def _paper_x(suffix: str, what: str) -> str:
    return f"{'NFSv3' if suffix else LOCAL}, {what}"


_WHY_LATENCY = {
    "": (
        "What the relay adds is of the order of what the paper's added (134 µs), and a large part of it is FUSE's: "
        "bindfs, in C, needs it, too. What it is added to took 186 µs there and takes one to three here. A fchown is "
        "done as the caller, in a thread that takes over its credentials. "
    ),
    "-nfs": WHY["-nfs"].replace(" (`toolkit-latency-nfs`)", ""),
}


def _figure_latency(suffix: str) -> Figure:
    checks = [
        Claim(f"MNU / VAN, {x}, {what}", At("MNU", f"{x}, {what}"), At("VAN", f"{x}, {what}"), 320 / 186)
        for x in SETTINGS[suffix]
        for what in ("fchown", "getattr")
    ]
    return Figure(
        key=f"toolkit-latency{suffix}",
        paper=TOOLKIT,
        place="§6.1.1",
        title=f"latency of a null relay, {_PLACES[suffix]}",
        claim="A null relay takes 1.7 times as long for an operation that needs almost no work; that is a minor part "
        "of what applications do.",
        unit="µs",
        x_label="setting and operation",
        differs=f"{_RELAY}getattr is ours: statx(2) with AT_STATX_FORCE_SYNC, which no cache may answer. "
        f"{_WHERE[suffix]}",
        criterion=claims.criterion(checks),
        judge=partial(claims.judge, checks),
        paper_values=(
            printed("VAN", {_paper_x(suffix, "fchown"): 186}),
            printed("MNU", {_paper_x(suffix, "fchown"): 320}),
        ),
        paper_note="Printed in the text, of NFS 3 and dumbfs.",
        baseline="VAN",
        form=Form.BARS,
        why=_WHY_LATENCY[suffix],
    )


def _figure_sequential(suffix: str) -> Figure:
    checks = [
        Claim(f"MNU / VAN, {x}", At("MNU", x), At("VAN", x), 10.3 / 11.2, Sense.NO_LESS) for x in SETTINGS[suffix]
    ]
    x = SETTINGS[suffix][0]
    return Figure(
        key=f"toolkit-sequential{suffix}",
        paper=TOOLKIT,
        place="§6.1.1",
        title=f"sequential reading of a sparse file through a null relay, {_PLACES[suffix]}",
        claim="A null relay delivers 92 % of what the server behind it does.",
        unit="MB/s",
        x_label="setting",
        differs=f"{_RELAY}The paper's network was the limit there, at 11.2 MB/s; here memory is. 100 MiB are read, "
        f"from a file without blocks, which nobody has cached. {_WHERE[suffix]}",
        criterion=claims.criterion(checks),
        judge=partial(claims.judge, checks),
        paper_values=(printed("VAN", {x: 11.2}), printed("MNU", {x: 10.3})),
        paper_note="Printed in the text, of NFS 3 and dumbfs.",
        baseline="VAN",
        form=Form.BARS,
    )


def figure_7(suffix: str) -> Figure:
    """Return the figure that the builds of `zadok` give samples for."""
    checks = [
        Claim(f"make, MNU / VAN, {x}", At("MNU", f"{x}, make"), At("VAN", f"{x}, make"), 1.04) for x in SETTINGS[suffix]
    ]
    return Figure(
        key=f"toolkit-7{suffix}",
        paper=TOOLKIT,
        place="Figure 7",
        title=f"phases of a build through a null relay, {_PLACES[suffix]}",
        claim="The time to compile is only 4 % longer through a null relay.",
        unit="time / VAN's",
        x_label="setting and phase",
        differs=f"{_RELAY}{NAME} instead of emacs 20.7, of which a compilation took a minute. "
        f"{CONFIGURED[suffix]}{_WHERE[suffix]}",
        criterion=claims.criterion(checks),
        judge=partial(claims.judge, checks),
        paper_values=(
            printed("VAN", {_paper_x(suffix, "make"): 1.0}),
            printed("MNU", {_paper_x(suffix, "make"): 1.04}),
        ),
        paper_note="The bars are a picture that our text of the paper lacks; §6.1.1 prints the 4 %.",
        form=Form.BARS,
        why=WHY[suffix],
    )


def _figure_mab(suffix: str) -> Figure:
    checks = [
        Claim(f"{phase}, MNU / VAN, {x}", At("MNU", f"{x}, {phase}"), At("VAN", f"{x}, {phase}"), 1.1, bound=True)
        for x in SETTINGS[suffix]
        for phase in (*MAB, "all")
    ]
    return Figure(
        key=f"sfs-6-1{suffix}",
        paper=SFS,
        place="Figure 6-1",
        title=f"phases of a modified Andrew benchmark, {_PLACES[suffix]}",
        claim="A file system in user space is competitive with NFS on a standard workload.",
        unit="seconds",
        x_label="setting and phase",
        differs="The benchmark itself is lost: 20 directories are made, 19 small files are copied into each, all are "
        "listed by `ls -lR` and searched for a string that does not appear, and one copy is compiled, with caches "
        f"warm. SFS had a network, encryption and a cache on the client, of which cloakfs has none. "
        f"{_RELAY}{_WHERE[suffix]}The bound of 1.1 is the toolkit's paper's: in all phases, a relay was no more than "
        "10 % slower than NFS 3 (§6.2.2).",
        criterion=claims.criterion(checks),
        judge=partial(claims.judge, checks),
        paper_note="The bars are a picture that our text of the paper lacks, and the text prints no values.",
        baseline="VAN",
        form=Form.BARS,
        why=WHY[suffix],
    )


def _latency_samples(suffix: str, setting: str, values: Values) -> Iterator[Sample]:
    for name, of in values.items():
        for what in ("fchown", "getattr"):
            yield Sample(f"toolkit-latency{suffix}", name, f"{setting}, {what}", of[what])
        yield Sample(f"toolkit-sequential{suffix}", name, setting, of["sequential"])


def _mab_samples(suffix: str, setting: str, values: Values) -> Iterator[Sample]:
    for name, of in values.items():
        for phase in MAB:
            yield Sample(f"sfs-6-1{suffix}", name, f"{setting}, {phase}", of[phase])
        yield Sample(f"sfs-6-1{suffix}", name, f"{setting}, all", sum(of[phase] for phase in MAB))


def _experiments(suffix: str) -> Iterator[Experiment]:
    nfs = bool(suffix)
    yield experiment(
        suffix,
        TRIALS["mab"],
        "sfs-mab",
        (_figure_mab(suffix),),
        3 if nfs else 10,
        partial(_mab_samples, suffix),
        (65, 30) if nfs else (15, 4),
        quick=not nfs,
    )
    yield experiment(
        suffix,
        TRIALS["latency"],
        "toolkit-relay",
        (_figure_latency(suffix), _figure_sequential(suffix)),
        3 if nfs else 10,
        partial(_latency_samples, suffix),
        (35, 25) if nfs else (10, 3),
    )


EXPERIMENTS = (*_experiments(""), *_experiments("-nfs"))
