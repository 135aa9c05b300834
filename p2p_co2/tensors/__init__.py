"""The tensor wing: codecs, the outer step, aggregation, fragments and checkpoints. It knows no network."""
