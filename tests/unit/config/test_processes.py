"""A process is found again by pid and start time, and ended even when it ignores SIGTERM."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

from sirara.config.processes import ProcessId, end_processes

SLEEPER = "import signal, sys; {0}; print('ready', flush=True); signal.pause()"


def start(setup="pass"):
    process = subprocess.Popen([sys.executable, "-c", SLEEPER.format(setup)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_process_survives_the_way_through_json():
    this = ProcessId.current()
    assert ProcessId.from_record(this.as_record()) == this
    assert this.alive and this.here
    assert ProcessId.from_record({"pid": "x"}) is None


def test_a_reused_pid_is_not_the_recorded_process():
    this = ProcessId.current()
    assert not dataclasses.replace(this, started=this.started + 1).alive
    assert not dataclasses.replace(this, boot="an earlier boot").alive
    assert not dataclasses.replace(this, host="elsewhere").alive


def test_a_zombie_is_not_alive():
    process = start()
    identity = ProcessId.of(process.pid)
    assert identity.alive
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.alive
    process.wait()
    process.stdout.close()


def test_end_processes_uses_sigterm_first_and_sigkill_on_those_that_ignore_it():
    polite, stubborn = start(), start("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    begun = time.monotonic()
    left = end_processes([ProcessId.of(polite.pid), ProcessId.of(stubborn.pid)], grace_s=0.3)
    assert left == []
    assert time.monotonic() - begun < 5
    assert polite.wait() == -signal.SIGTERM
    assert stubborn.wait() == -signal.SIGKILL
    polite.stdout.close()
    stubborn.stdout.close()


def test_end_processes_leaves_a_process_that_only_has_the_same_pid():
    process = start()
    other = dataclasses.replace(ProcessId.of(process.pid), started=1)
    assert end_processes([other], grace_s=0.1) == []
    assert process.poll() is None
    process.kill()
    process.wait()
    process.stdout.close()
