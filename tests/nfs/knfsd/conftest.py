"""Tests against the kernel's NFS server and client, which run in the laboratory's guest (bench/lab)."""

import json
import os

import pytest

from tests.nfs.lab import lab

if lab.inside():
    from tests.nfs.knfsd.fixtures import *  # noqa: F403

_HERE = os.path.dirname(__file__)
_TESTS = pytest.StashKey[lab.Tests]()


def _is_ours(item: pytest.Item) -> bool:
    return str(item.path).startswith(_HERE + os.sep)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None if lab.inside() else lab.missing()
    for item in items:
        if reason and _is_ours(item):
            item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=_is_ours)  # last, when the guest has got on with them


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """On the host: have the guest begin, which leaves the host a processor for its own tests."""
    ours = [item.nodeid for item in session.items if _is_ours(item)]
    if ours and not lab.inside() and not lab.missing() and not session.config.option.collectonly:
        session.config.stash[_TESTS] = lab.Tests(session.config, ours)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """On the host: log the reports that the guest writes on this test."""
    if lab.inside() or not _is_ours(item) or lab.missing():
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        for report in item.config.stash[_TESTS].reports(item.nodeid):
            item.ihook.pytest_runtest_logreport(report=report)
    except RuntimeError as exc:
        item.ihook.pytest_runtest_logreport(
            report=pytest.TestReport(item.nodeid, item.location, {}, "failed", str(exc), "call")
        )
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class _Reporter:
    """In the guest: tells the host of each report at once."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._file = open(os.path.join(lab.OUT, "reports"), "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._file.write(json.dumps(data, default=str) + "\n")


def pytest_sessionstart(session: pytest.Session) -> None:
    if lab.inside():
        session.config.pluginmanager.register(_Reporter(session.config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _TESTS in session.config.stash:
        session.config.stash[_TESTS].close()
