"""The `tilewise` command. It lies beside the library, not in it: `import tilewise` imports torch, and `tilewise --help` should not have to wait for that."""
