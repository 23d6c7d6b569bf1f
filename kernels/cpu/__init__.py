"""The forward step of a Llama-family model on a CPU, in C++: built once on the machine that runs it (see ``build``)."""
