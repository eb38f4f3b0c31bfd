"""Diagnoses of real controllers: Redis, the data set, a hub and a silent worker are named by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.process.user_code import python_module
from paceline.redis.client import connect_sync
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2
from testbed.controller_processes import Controllers
from testbed.controllers import addresses, config_of, running_controllers, until, working_fleet
from testbed.fake_workers import FakePolicy
from testbed.local_run import write_run
from testbed.redis_process import *  # noqa: F403  (placeholder)
from tests.fixtures.rest import rest_url
