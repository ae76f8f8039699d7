"""A model of training on a fabric, and the policy that spaces ranks out: arrays in, plans out; knows no findings.

`parameters` are the numbers with their sources, `topology` the links and who shares them, `simulator` one training on
them, iteration by iteration, `pacing` what a coordinator may ask of ranks. `docs/fabric-model.md` says what is
calibrated and where the model is wrong. Pure: the clock and the dice are arguments. Used by `simulation`.
"""
