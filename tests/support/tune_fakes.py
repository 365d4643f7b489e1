"""A bench that computes nothing, for test_tune: candidates do what FAKE_TUNE says of their places in the model's order.

FAKE_TUNE is JSON: {"1": "crash", "2": "hang", ...}, and "delay": seconds of each check. FAKE_LOG names a file that
each check is written to; FAKE_FIRST one that marks that a process was the first.
"""

import json
import os
import signal
import time
from pathlib import Path

from portmm.comparison.peers import MissingError
from portmm.dispatch import config
from portmm.errors import BuildError, ScheduleError
from portmm.schedule.text import spell
from portmm.tuning.proposals import ranked

FACTORS = {"fast": 0.5, "slow": 3.0, "lucky": 0.5}


class Fake:
    def __init__(self, setup):
        self.threads, self.cold = setup.threads, setup.cold
        self.rules = json.loads(os.environ.get("FAKE_TUNE", "{}"))
        self.log = os.environ.get("FAKE_LOG")
        self.places = {}
        # Luck is a process's: that of the first one.
        mark = Path(os.environ.get("FAKE_FIRST", os.devnull))
        self.first = not mark.exists()
        mark.touch()

    def prepare(self, case, _seed):
        if case.group == "impossible":
            raise ScheduleError("there is nothing to tune")
        p = case.problem
        self.places = {x.key: i for i, x in enumerate(ranked(p, config.target(), self.threads))}
        return p

    def build(self, schedule):
        if self.rule(schedule, 1) == "unbuildable":
            raise BuildError("the compiler says no")

    def rule(self, schedule, workers):
        place = self.places.get((spell(schedule), workers))
        return self.rules.get("beyond" if place is None else str(place), "")

    def check(self, schedule, workers):
        rule = self.rule(schedule, workers)
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(f"{spell(schedule)} {workers}\n")
        time.sleep(self.rules.get("delay", 0))
        if rule == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if rule == "hang":
            time.sleep(1000)
        return (1.0 if rule == "wrong" else 0.0), 0.5

    def seconds(self, schedule, workers, _seconds):
        rule = self.rule(schedule, workers)
        if rule == "late crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        lucky = rule != "lucky" or self.first
        return (2e-4 if self.cold else 1e-4) * (FACTORS.get(rule, 1.05) if lucky else 2.0)


def fake(setup):
    return Fake(setup)


def absent(_setup):
    raise MissingError("no portmm here")
