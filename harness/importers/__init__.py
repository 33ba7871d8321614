"""Other people's logs as traces: one file per format in this package, found by itself; names of metrics are YAML data.

``harness.importers.base.Format`` says what a format is, ``harness.importers.reading.import_logs`` reads.
"""
