"""`dist-train data prepare | show`: tokenize a corpus ahead of a run, and look at what the model will read."""

from __future__ import annotations

import sys

HELP = """usage: dist-train data prepare [hydra overrides]
       dist-train data show [hydra overrides]

prepare  tokenize the data of this config into the cache, and print where the files are and what they hold
show     print the first rows of a run of this config as text, with their documents and loss mask

examples
  dist-train data prepare data=text data.path=book.txt
  dist-train data prepare data=jsonl data.path='corpus/*.jsonl' data.text_field=content data.tokenizer=bytes
  dist-train data show data=text data.path=book.txt train.seq_len=64

Prepared folders can be given to a run by: data=tokens data.path=FOLDER
"""


def main(argv: list[str]) -> int:
    """Exit code 0; 2 for bad config or input (also when ConfigError is raised, which the caller prints)."""
    if not argv or argv[0] in ("-h", "--help") or any(word in ("-h", "--help") for word in argv[1:]):
        print(HELP, end="")
        return 0 if argv else 2
    commands = {"prepare": prepare_command, "show": show_command}
    if argv[0] not in commands:
        from dist_train.config.compose import ConfigError

        raise ConfigError(f"dist-train data {argv[0]}: no such command; give prepare or show.")
    commands[argv[0]](argv[1:])
    return 0


def prepare_command(overrides: list[str]) -> None:
    """Prepare the data of these overrides and print where and what it is. Raises ConfigError."""
    from dist_train.config.compose import compose
    from dist_train.data.corpus import prepare

    corpus = prepare(compose(overrides).data, progress=sys.stderr.isatty())
    facts = corpus.describe()
    for source in facts["sources"]:
        train, held = source["train"], source["evaluation"]
        print(f"{source['name']}  (weight {source['weight']:g})")
        print(f"  files       {source['folder'] or 'none: made in memory from its seed'}")
        print(
            f"  training    {train['documents']:,} documents, {train['tokens']:,} tokens, {train['text_bytes']:,} bytes of text"
        )
        print(f"  held out    {held['documents']:,} documents, {held['tokens']:,} tokens, {held['text_bytes']:,} bytes of text")
    print(f"tokenizer     {facts['vocab_size']:,} ids, {facts['bytes_per_token']:.2f} bytes of text per token")
    print(f"fingerprint   {facts['fingerprint']}")
    first = corpus.train[0].tokens[: int(corpus.train[0].offsets[1])][:48].tolist()
    print(f"example       {first[:12]}…" if len(first) > 12 else f"example       {first}")
    print(f"              {corpus.tokenizer.decode(first)!r}")


def show_command(overrides: list[str]) -> None:
    """Print the first micro-batch of a run with these overrides. Raises ConfigError."""
    from dist_train.config.compose import compose
    from dist_train.data.batches import TrainBatches
    from dist_train.data.corpus import prepare
    from dist_train.data.show import render_rows

    config = compose(overrides)
    corpus = prepare(config.data, progress=sys.stderr.isatty())
    batches = TrainBatches(corpus, config.train, config.data.shuffle, dp_size=1, dp_index=0)
    batch = batches.step(0)[0]
    print(f"{batches.rows_per_epoch:,} rows of {config.train.seq_len} tokens in an epoch; the first micro-batch of step 0:")
    print(render_rows(batch, corpus.tokenizer, rows=4))
