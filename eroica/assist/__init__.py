"""What helps people after a diagnosis: `eroica fix` turns a software finding into a measured patch.

Deterministic first: `codemods` are small proofs about source code that end in an edit or in a reason against it, and
`edits` applies what somebody else proposes, within limits. `fixing` does both in a worktree of the user's repository,
runs the user's own commands there, and `forge` opens a draft pull request. Nothing here decides what is wrong: that
stands in the diagnosis. Only `codemods` (by `rewriting`) needs the extra `fix`.
"""
