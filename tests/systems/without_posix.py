"""Python as it is on Windows: a program that runs others without the modules and functions that are POSIX's.

``python tests/systems/without_posix.py PROGRAM...``. Echelon's own imports of such modules fail; of `os`, `signal` and
`socket`, what Windows lacks is gone for all; folders cannot be opened, links need a privilege, and a file that is open
keeps its folder from being renamed. torch and the standard library are imported first: theirs they know how to do
without.
"""

import asyncio  # noqa: F401
import builtins
import concurrent.futures.process  # noqa: F401
import multiprocessing.forkserver
import multiprocessing.util
import os
import random  # noqa: F401
import runpy
import shutil
import signal
import socket
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import uuid  # noqa: F401

import tensorboard.summary.writer.event_file_writer  # noqa: F401
import torch._dynamo
import torch.distributed.elastic.agent.server.api
import torch.utils.data
import torch.utils.tensorboard

MODULES = frozenset(("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"))
OF_OS = (
    *("fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getgid", "getegid", "getpgid", "getpgrp", "getsid"),
    *("setsid", "killpg", "uname", "getloadavg", "sched_getaffinity", "sched_setaffinity", "sysconf", "nice", "mkfifo"),
    *("chown", "fchown", "pread", "pwrite", "posix_fallocate", "posix_fadvise", "sync", "fdatasync", "sendfile"),
    *("statvfs", "fstatvfs", "wait", "getpriority", "memfd_create", "pidfd_open", "eventfd", "openpty"),
    *("O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "O_SYNC", "O_ASYNC"),
)
OF_SIGNAL = (
    *("SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGSTOP", "SIGCONT", "SIGCHLD", "SIGALRM", "SIGQUIT", "SIGPIPE"),
    *("pthread_sigmask", "pthread_kill", "setitimer", "alarm", "siginterrupt", "sigpending", "sigwait", "pause"),
)
OF_SOCKET = ("AF_UNIX",)


def hide() -> None:
    """Take away what Windows does not have."""
    plain_import, plain_open = builtins.__import__, os.open

    def imported(name, globals=None, *others, **kwargs):
        of = (globals or {}).get("__name__", "")
        if name in MODULES and (of == "echelon" or of.startswith("echelon.")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain_import(name, globals, *others, **kwargs)

    def opened(path, flags, mode=0o777, *, dir_fd=None):
        if dir_fd is not None:
            raise NotImplementedError("dir_fd unavailable on this platform")
        if isinstance(path, str | os.PathLike) and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return plain_open(path, flags, mode)

    def linked(source, target, *others, **kwargs):
        raise OSError(22, "A required privilege is not held by the client", str(source))

    builtins.__import__ = imported
    os.open, os.symlink = opened, linked
    os.supports_dir_fd.clear()
    shutil._use_fd_functions = False  # decided when it was imported
    for place, names in ((os, OF_OS), (signal, OF_SIGNAL), (socket, OF_SOCKET)):
        for name in names:
            if hasattr(place, name):
                delattr(place, name)


if __name__ == "__main__":
    assert torch.distributed.is_available()
    assert multiprocessing.forkserver is not None
    hide()
    for program in sys.argv[1:]:
        runpy.run_path(program, run_name="__main__")
