package vkcocoon

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/section"
	"cocoonstack.io/cocoon/internal/testkit/settingsdoc"
)

const docs = "../../../docs/"

func TestSettingsAreDocumented(t *testing.T) {
	all := new(options).settings()
	settingsdoc.Reference(t, "vk-cocoon", all)
	settingsdoc.Example(t, "deploy/vk-cocoon/vk-cocoon.env.example", all, "VK_CONFIG")
}

// The settings of a Config have the same keys in vk-cocoon's file and in cocoond's.
func TestKeysAreThoseOfConfig(t *testing.T) {
	var tags, keys []string
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Config]()) {
		if key, _, _ := strings.Cut(f.Tag.Get("json"), ","); key != "" && key != "-" {
			tags = append(tags, key)
		}
	}
	for _, s := range new(options).settings() {
		if s.Key != "" && !slices.Contains([]string{"socket", "runtime", "cocoonBin", "logLevel", "logFormat"}, s.Key) {
			keys = append(keys, s.Key)
		}
	}
	slices.Sort(tags)
	slices.Sort(keys)
	if !slices.Equal(tags, keys) {
		t.Errorf("Config has %q, the table %q", tags, keys)
	}
}

func TestReference(t *testing.T) {
	var b strings.Builder
	b.WriteString("| annotation | values | written by | meaning |\n|---|---|---|---|\n")
	for _, e := range contract.Reference() {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", e.Key, e.Values, e.Who, e.Text)
	}
	section.Check(t, "docs/reference.md", "annotations", b.String())
}

// Every test that a checklist names exists.
func TestChecklistNamesTestsThatExist(t *testing.T) {
	var text []byte
	for _, name := range []string{"seed-checklist.md", "capsule-checklist.md"} {
		part, err := os.ReadFile(docs + name)
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, part...)
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
