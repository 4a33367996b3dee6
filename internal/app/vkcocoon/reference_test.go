package vkcocoon

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/api/contract"
)

var update = flag.Bool("update", false, "write docs/reference.md anew")

const docs = "../../../docs/"

// docs/reference.md is generated from the code: `go test ./internal/app/vkcocoon -run TestReference -update`.
func TestReference(t *testing.T) {
	var b strings.Builder
	b.WriteString("# Reference\n\nMade from the code (`go test ./internal/app/vkcocoon -run TestReference -update`); a test fails when it is stale.\n\n## Settings of vk-cocoon\n\n" +
		"A flag wins over the variable, the variable over the key of `--config` (`VK_CONFIG`). `EPOCH_TOKEN` is a variable only.\n\n" +
		"| variable | flag | key | default | meaning |\n|---|---|---|---|---|\n")
	code := func(s string) string {
		if s == "" {
			return ""
		}
		return "`" + s + "`"
	}
	for _, s := range Settings() {
		fmt.Fprintf(&b, "| `%s` | `--%s` | `%s` | %s | %s |\n", s.Env, s.Flag, s.Key, code(s.Default), s.Usage)
	}
	b.WriteString("\n## Annotations\n\n[compat.md](compat.md) says which are honoured how.\n\n| annotation | values | written by | meaning |\n|---|---|---|---|\n")
	for _, e := range contract.Reference() {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", e.Key, e.Values, e.Who, e.Text)
	}
	path := docs + "reference.md"
	if *update {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(path)
	if err != nil || string(have) != b.String() {
		t.Errorf("docs/reference.md is stale (%v): run the test with -update", err)
	}
}

// Every test that the checklist names exists.
func TestChecklistNamesTestsThatExist(t *testing.T) {
	text, err := os.ReadFile(docs + "seed-checklist.md")
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
	for _, dir := range []string{"../../../api", "../../../internal", "../../../test", "../../../deploy"} {
		err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			switch {
			case err != nil || d.IsDir():
				return err
			case strings.HasSuffix(path, ".txtar"):
				there[filepath.Base(path)] = true
			case strings.HasSuffix(path, "_test.go"):
				source, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				for _, m := range declared.FindAllSubmatch(source, -1) {
					there[string(m[1])] = true
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	named := regexp.MustCompile("`((?:Test|Fuzz|Benchmark)\\w+|\\w+\\.txtar)`").FindAllSubmatch(text, -1)
	if len(named) < 40 {
		t.Errorf("the checklist names %d tests only", len(named))
	}
	for _, m := range named {
		if !there[string(m[1])] {
			t.Errorf("the checklist names %s, which is not there", m[1])
		}
	}
}
