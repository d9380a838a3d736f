"""Configurations that the sampler's filter turned away: rows in bulk, cheap enough for thousands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select

from tuner.store import schema
from tuner.store.rows import NewRejection, RejectionRecord, storable_text, to_storable
from tuner.store.transactions import Transactional, snapshot


class Rejections(Transactional):
    """Reads what was turned away."""

    @snapshot
    def all(self, connection: Connection, study_id: int) -> list[RejectionRecord]:
        """Return a study's rejections in the order of their draws."""
        columns = schema.rejection.c
        query = select(schema.rejection).where(columns.study_id == study_id)
        rows = connection.execute(query.order_by(columns.number, columns.place))
        return [_record(row) for row in rows]

    @snapshot
    def one(self, connection: Connection, rejection_id: int) -> RejectionRecord:
        """Return one rejection."""
        row = connection.execute(select(schema.rejection).where(schema.rejection.c.id == rejection_id)).one()
        return _record(row)

    @snapshot
    def count(self, connection: Connection, study_id: int) -> tuple[int, int | None]:
        """Return how many there are, and the smallest prediction among them."""
        columns = schema.rejection.c
        query = select(func.count(), func.min(columns.predicted_bytes)).where(columns.study_id == study_id)
        count, smallest_bytes = connection.execute(query).one()
        return count, smallest_bytes


def _record(row: Row[Any]) -> RejectionRecord:
    return RejectionRecord(
        **{field.name: getattr(row, field.name) for field in dataclasses.fields(RejectionRecord)}
    )


def add_rejections(
    connection: Connection, study_id: int, number: int, rejections: Sequence[NewRejection]
) -> None:
    """Add what was turned away before a trial's configuration was taken."""
    rows = [
        {
            "study_id": study_id,
            "number": number,
            "place": place,
            "params": to_storable(one.params),
            "answers": None if one.answers is None else to_storable(one.answers),
            "predicted_bytes": one.predicted_bytes,
            "reason": storable_text(one.reason),
        }
        for place, one in enumerate(rejections)
    ]
    if rows:
        connection.execute(insert(schema.rejection), rows)
