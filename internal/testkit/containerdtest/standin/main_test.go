package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
)

func TestEffectiveUser(t *testing.T) {
	var out bytes.Buffer
	if err := run([]string{"/usr/bin/nnp"}, &out); err != nil || out.String() != fmt.Sprintf("Effective uid: %d\n", os.Geteuid()) {
		t.Errorf("nnp: %q, %v", out.String(), err)
	}
}

func TestMistakes(t *testing.T) {
	for want, args := range map[string][]string{
		`no program "cat"`:  {"cat"},
		`"http" is no port`: {"/bin/httpd", "http"},
	} {
		if err := run(args, io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", args, err, want)
		}
	}
}
