package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/image/local"
)

// busybox is a stand-in that lists its applets, so that the test needs nothing installed.
const busybox = "#!/bin/sh\nprintf 'sh\\nls\\ncat\\nbusybox\\n'\n"

func TestImageIsDeterministicAndImports(t *testing.T) {
	dir := t.TempDir()
	bb, server := filepath.Join(dir, "busybox"), filepath.Join(dir, "server")
	for path, data := range map[string]string{bb: busybox, server: "server"} {
		if err := os.WriteFile(path, []byte(data), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	var outs [2][]byte
	for i := range outs {
		out := filepath.Join(dir, "out.tar")
		if err := run([]string{"-busybox", bb, "-server", server, "-o", out}); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		outs[i] = data
	}
	if !bytes.Equal(outs[0], outs[1]) {
		t.Error("two builds of the same files differ")
	}
	s, err := local.New(local.Config{Dir: filepath.Join(dir, "store"), Arch: "amd64"})
	if err != nil {
		t.Fatal(err)
	}
	img, err := s.Import(t.Context(), imageName, bytes.NewReader(outs[0]), nil)
	if err != nil {
		t.Fatal(err)
	}
	if img.Config.Entrypoint[0] != "/usr/bin/server" || img.Arch != "amd64" {
		t.Errorf("imported %+v", img)
	}
}
