"""Pipeline parallelism: a module's own step, cut into stages and run by a schedule. Imports module and below."""
