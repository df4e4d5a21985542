"""Citations in model cards."""

from __future__ import annotations

import re

_PAPER = re.compile(r"\[([^\]]+)\]\((https://arxiv\.org/abs/([\d.]+))\)")
_BIBTEX = {
    "2509.22576": """@article{xu2025epo,
  title   = {{EPO}: Entropy-regularized Policy Optimization for {LLM} Agents Reinforcement Learning},
  author  = {Xu, Wujiang and Zhao, Wentian and Wang, Zhenting and Li, Yu-Jhe and Jin, Can and Jin, Mingyu and
             Mei, Kai and Wan, Kun and Metaxas, Dimitris N.},
  journal = {arXiv preprint arXiv:2509.22576},
  year    = {2025}
}"""
}


def citation(method: str) -> str:
    """Returns, in Markdown, the papers linked in a method's description, with BibTeX where available.

    Args:
        method: Markdown description of how a model was trained.
    """
    links = {number: f"[{name}]({link})" for name, link, number in _PAPER.findall(method)}
    papers = ", ".join([*links.values(), "[TRL](https://github.com/huggingface/trl#citation)"])
    entries = [_BIBTEX[number] for number in links if number in _BIBTEX]
    bibtex = "\n\n```bibtex\n" + "\n\n".join(entries) + "\n```" if entries else ""
    return f"Please cite the following works: {papers}, and the authors of the environment.{bibtex}"
