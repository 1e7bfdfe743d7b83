"""Weight formats: the QTensor, the table of formats, one file a format."""
