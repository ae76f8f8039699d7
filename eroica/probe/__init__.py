"""The probe: what of eroica lives inside of a training process.

`import eroica` calls `late.watch`, which costs one entry in `sys.meta_path`. When torch has been imported, `hooks` and
`collectives` take their places; at the first step or collective of a process that has a rank, `recorder` makes the
flight ring (`eroica.ring`) and writes to it from then on. There is no thread, no socket and no loop.

It is a wall: everything here stays within the standard library and a torch that somebody else imported, never raises
into training and never waits, but for the `gate` where somebody has switched pacing on. Whatever goes wrong in a hook
switches all of it off (`recorder.Recorder.fail`).
"""
