"""Fixtures of the tests of the laboratory."""

from __future__ import annotations

import shutil
import subprocess

import pytest

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static double asked(const char *name) { const char *value = getenv(name); return value ? atof(value) : 0; }

int fsync(int file) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    usleep(1e6 * asked("SLOW_FSYNC"));
    return real(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += (time_t)asked("CLOCK_OFFSET");
    return failed;
}
"""
"""Before libc: fsync takes SLOW_FSYNC seconds more, the wall clock is CLOCK_OFFSET seconds
ahead."""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", "shim.so", "shim.c", "-ldl"], cwd=folder, check=True
    )
    return str(folder / "shim.so")
