package local

import (
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// FuzzParse gives arbitrary bytes to the parser of records: it either refuses them with an error class, or returns a
// snapshot whose files have our names, each once.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"id":"aaaaaaaaaaaaaaaaaaaaaaaaaa","name":"n","memory":1,"live":true,"disks":[{"role":"cow","layers":[{"file":"disk-0.0.raw","format":"raw"},{"file":"disk-0.1.qcow2","format":"qcow2"}]}]}`))
	f.Add([]byte(`{"id":"aaaaaaaaaaaaaaaaaaaaaaaaaa","name":"n","disks":[{"role":"layer","image":true}]}`))
	f.Add([]byte(`{"memory":9223372036854775807}`))
	f.Add([]byte(`{"id":"aaaaaaaaaaaaaaaaaaaaaaaaaa","name":"n","disks":[{"role":"cow","layers":[{"file":"../x.raw","format":"raw"}]}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := parse(data)
		if err != nil {
			if !errdefs.IsInvalid(err) {
				t.Errorf("%v is %v", err, errdefs.ClassOf(err))
			}
			return
		}
		if !vm.ID(s.ID).Valid() || checkName(s.Name) != nil {
			t.Errorf("it accepts %q and %q", s.ID, s.Name)
		}
		seen := map[string]bool{snapshot.FileMeta: true}
		for _, file := range s.Files() {
			if seen[file] || filepath.Base(file) != file || file[0] == '.' {
				t.Errorf("it accepts the file %q", file)
			}
			seen[file] = true
		}
		if checkSize(s, snapshot.FileMemory, s.Memory+1) == nil {
			t.Errorf("%d bytes of memory may have more", s.Memory)
		}
		s.Foreign()
	})
}
