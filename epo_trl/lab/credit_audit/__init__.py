"""Compares the advantages that credits assign with the true ones, which continuations from copied states estimate."""

from epo_trl.lab.credit_audit.estimators import list_estimators
from epo_trl.lab.credit_audit.rounds import AuditPlan, Player, play_round
from epo_trl.lab.credit_audit.statistics import Comparison, compare

__all__ = ["AuditPlan", "Comparison", "Player", "compare", "list_estimators", "play_round"]
