"""A graph of concepts, from coarse to fine, on disk.

Edges lead from a concept to a finer one and never close a cycle; a concept may have several
parents. Every write can be repeated, and a node leaves the frontier in the transaction that adds
its children, so that a run that died goes on where it was. Nodes found twice are one node: a
candidate that means the same as one of the nearest by words becomes another edge to it.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baltoro.agents.synthesis.corpus import WORD

SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS nodes (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, summary TEXT NOT NULL,
    depth INTEGER NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS edges (
    parent INTEGER NOT NULL, child INTEGER NOT NULL, PRIMARY KEY (parent, child));
CREATE TABLE IF NOT EXISTS evidence (
    node INTEGER NOT NULL, document TEXT NOT NULL, PRIMARY KEY (node, document));
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(name, summary);
"""
FORMAT_VERSION = "1"
NUM_SIMILAR = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A concept."""

    id: int
    name: str
    summary: str
    depth: int  # of the shortest way from a seed
    is_atomic: bool  # expanded, and there is nothing finer
    attempts: int  # how often it was sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """A finer concept that an expansion found."""

    name: str
    summary: str
    documents: tuple[str, ...]  # ids of the documents that show it
    same_as: int | None = None  # the node that means the same


class Graph:
    """The concepts in one SQLite file."""

    def __init__(self, path: Path, corpus_fingerprint: str):
        """Open or make. `ValueError` if it was made over another corpus or by another version."""
        self._db = sqlite3.connect(path)
        with self._db:
            self._db.executescript(SCHEMA)
            for name, value in (("version", FORMAT_VERSION), ("corpus", corpus_fingerprint)):
                self._db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, value))
                (then,) = self._one("SELECT value FROM facts WHERE name = ?", name)
                if then != value:
                    break
        if then != value:
            self._db.close()
            raise ValueError(f"{path}: was made with {name}={then!r}, not {value!r}")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def add_seed(self, name: str) -> int:
        """A coarse concept to begin with; the node's id. Twice is fine."""
        with self._db:
            return self._add_node(name, "", 0)

    def frontier(self) -> Node | None:
        """The open node nearest to the seeds, the oldest of equals; None if all are expanded."""
        row = self._db.execute(
            "SELECT id FROM nodes WHERE state = 'open' ORDER BY depth, id LIMIT 1"
        ).fetchone()
        return None if row is None else self.node(row[0])

    def expand(self, node_id: int, children: Sequence[Child], *, max_depth: int) -> list[int]:
        """Record what an expansion found, all at once; the ids of the node's children.

        Without children, or at `max_depth`, the node is atomic. An edge that would close a cycle is
        left out.
        """
        with self._db:
            node = self.node(node_id)
            added = []
            for child in children if node.depth < max_depth else ():
                child_id = child.same_as
                if child_id is None:
                    child_id = self._add_node(child.name, child.summary, node.depth + 1)
                if child_id == node_id or node_id in self.descendants(child_id):
                    continue
                self._db.execute("INSERT OR IGNORE INTO edges VALUES (?, ?)", (node_id, child_id))
                for document in child.documents:
                    self._db.execute(
                        "INSERT OR IGNORE INTO evidence VALUES (?, ?)", (child_id, document)
                    )
                added.append(child_id)
            state = "expanded" if added else "atomic"
            self._db.execute("UPDATE nodes SET state = ? WHERE id = ?", (state, node_id))
            return added

    def similar(self, name: str) -> list[Node]:
        """Nodes that share words with a name, best first: candidates for meaning the same."""
        words = WORD.findall(name)
        if not words:
            return []
        query = " OR ".join(f'"{word}"' for word in words)
        rows = self._db.execute(
            "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT ?",
            (query, NUM_SIMILAR),
        )
        return [self.node(row[0]) for row in rows.fetchall()]

    def node(self, node_id: int) -> Node:
        """A node. `KeyError` if there is none."""
        row = self._db.execute(
            "SELECT id, name, summary, depth, state, attempts FROM nodes WHERE id = ?", (node_id,)
        ).fetchone()
        if row is None:
            raise KeyError(f"node {node_id}")
        return Node(
            id=row[0],
            name=row[1],
            summary=row[2],
            depth=row[3],
            is_atomic=row[4] == "atomic",
            attempts=row[5],
        )

    def nodes(self) -> list[Node]:
        """All of them, in the order in which they were found."""
        return [self.node(row[0]) for row in self._db.execute("SELECT id FROM nodes ORDER BY id")]

    def parents(self, node_id: int) -> list[int]:
        """Coarser neighbours."""
        return self._ids("SELECT parent FROM edges WHERE child = ? ORDER BY parent", node_id)

    def children(self, node_id: int) -> list[int]:
        """Finer neighbours."""
        return self._ids("SELECT child FROM edges WHERE parent = ? ORDER BY child", node_id)

    def descendants(self, node_id: int) -> set[int]:
        """Everything finer, however far."""
        return self._reached("parent", "child", node_id)

    def ancestors(self, node_id: int) -> set[int]:
        """Everything coarser, however far."""
        return self._reached("child", "parent", node_id)

    def roots(self, node_id: int) -> set[int]:
        """The seeds that a node comes from, itself if it is one."""
        family = {node_id, *self.ancestors(node_id)}
        return {each for each in family if not self.parents(each)}

    def documents(self, node_id: int) -> list[str]:
        """Ids of the documents that show a node."""
        rows = self._db.execute(
            "SELECT document FROM evidence WHERE node = ? ORDER BY document", (node_id,)
        )
        return [row[0] for row in rows]

    def count_attempt(self, node_ids: Sequence[int]) -> None:
        """Remember that nodes were sampled."""
        with self._db:
            self._db.executemany(
                "UPDATE nodes SET attempts = attempts + 1 WHERE id = ?",
                [(node_id,) for node_id in node_ids],
            )

    def _add_node(self, name: str, summary: str, depth: int) -> int:
        known = self._db.execute("SELECT id FROM nodes WHERE name = ?", (name,)).fetchone()
        if known is not None:
            return int(known[0])
        row = self._db.execute(
            "INSERT INTO nodes (name, summary, depth, state) VALUES (?, ?, ?, 'open')",
            (name, summary, depth),
        )
        node_id = row.lastrowid
        assert node_id is not None
        self._db.execute(
            "INSERT INTO words (rowid, name, summary) VALUES (?, ?, ?)", (node_id, name, summary)
        )
        return node_id

    def _reached(self, start: str, end: str, node_id: int) -> set[int]:
        query = (
            f"WITH RECURSIVE found(id) AS (SELECT {end} FROM edges WHERE {start} = ?"
            f" UNION SELECT {end} FROM edges JOIN found ON {start} = found.id)"
            " SELECT id FROM found"
        )
        rows = self._db.execute(query, (node_id,))
        return {row[0] for row in rows}

    def _ids(self, query: str, node_id: int) -> list[int]:
        return [row[0] for row in self._db.execute(query, (node_id,))]

    def _one(self, query: str, *values: object) -> tuple[str]:
        row: tuple[str] = self._db.execute(query, values).fetchone()
        return row
