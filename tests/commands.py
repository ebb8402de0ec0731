"""Command lines without a process of their own: what a fresh Python imports takes longer than
most commands. Each file of tests that types this way has some command lines that are real."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from unittest import mock

from tensortap.cli.main import main


def type_in(*arguments, cwd=None, **environment):
    """`tensortap …` in this process: how it ended, what it printed, and what it said of errors."""
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    os.chdir(cwd or before)
    try:
        with (
            mock.patch.object(sys, "argv", ["tensortap", *map(str, arguments)]),
            mock.patch.dict(os.environ, {"COLUMNS": "120", **environment}),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                main()
                code = 0
            except SystemExit as ended:
                code = ended.code or 0
    finally:
        os.chdir(before)
    return code, out.getvalue(), err.getvalue()
