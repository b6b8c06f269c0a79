# Offshoot's chores. Each is `cargo xtask …`; what is here is what must be there before cargo can run.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test bench lab

help: ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/make \1\t\2/' | expand -t 14

demo: toolchain ## Install, build, make the guest image, run the main job (in the lab where KVM cannot run Linux)
	cargo xtask demo

test: toolchain ## Formatting, clippy, unit tests, native KVM tests, end-to-end tests with real guests
	cargo xtask test

bench: toolchain ## Measure natively; writes target/bench/results.json
	cargo xtask bench

lab: toolchain ## A shell in the lab, a Debian machine whose /dev/kvm is complete
	cargo xtask lab shell

setup: toolchain ## Install the Debian packages that are missing
	cargo xtask setup

# A linker and git come from Debian; the Rust toolchain is for the user to choose.
.PHONY: toolchain
toolchain:
	@command -v cargo >/dev/null || { \
	  echo 'error: cargo is not in PATH; install a Rust toolchain, 1.88 or newer' >&2; exit 1; }
	@missing=; \
	command -v cc >/dev/null || missing="$$missing gcc libc6-dev"; \
	command -v git >/dev/null || missing="$$missing git"; \
	test -z "$$missing" && exit 0; \
	command -v apt-get >/dev/null || { echo "error: missing:$$missing; this is for Debian 12 or newer" >&2; exit 1; }; \
	test "$$(id -u)" = 0 || { \
	  echo "error: missing:$$missing; as root: apt-get update && apt-get install$$missing" >&2; exit 1; }; \
	echo "==> install$$missing"; \
	DEBIAN_FRONTEND=noninteractive apt-get update -qq </dev/null; \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing </dev/null
