"""Decisions of the ledger, by subject, and the commands that ask for them: see ``commands``."""

from controller.ledger.decisions.commands import Command as Command
from controller.ledger.decisions.commands import CommandRefused as CommandRefused
from controller.ledger.decisions.held_out import *
from controller.ledger.decisions.hosts import *
from controller.ledger.decisions.leases import *
from controller.ledger.decisions.links import *
from controller.ledger.decisions.membership import *
from controller.ledger.decisions.mesh import *
from controller.ledger.decisions.rejections import *
from controller.ledger.decisions.run import *
from controller.ledger.decisions.seats import *
from controller.ledger.decisions.steps import *
