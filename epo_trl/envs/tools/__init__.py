"""Python functions as tools of an agent."""

from epo_trl.envs.tools.suite import ToolsArguments, ToolSuite, tool_call

__all__ = ["ToolSuite", "ToolsArguments", "tool_call"]
