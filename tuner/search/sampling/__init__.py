"""Samplers that know memory beforehand.

::

    inner sampler ─► draws ─► suggest() rehearsed ─► forecast ─┬─► turned away
                                                               └─► served to the real trial
"""
