"""How the half of eroica that asks models is graded: injections against a model that obeys, planted repositories."""
