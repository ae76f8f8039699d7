"""What helps people and assistants after a diagnosis: a patch, and what a model is given and may say.

`eroica fix` turns a software finding into a measured patch. Deterministic first: `codemods` are small proofs about
source code that end in an edit or in a reason against it, and `edits` applies what somebody else proposes, within
limits. `fixing` does both in a worktree of the user's repository, runs the user's own commands there, and `forge` opens
a draft pull request; where no codemod fits, `proposing` has a model write one, if it was named. `eroica chat` is a
`conversing` model at one of the `endpoints`, with the `toolbox` of the MCP server, or `answering` without a model.
Requests to models come from `asking`, claims are checked by `grounding`, and `clients` sets up those that speak MCP. A
wall: nothing here decides what is wrong, which stands in the diagnosis, and nothing below imports from here. Only
`codemods` (by `rewriting`) needs the extra `fix`, and models the extra `chat`.
"""
