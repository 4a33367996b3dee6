package vm

import (
	"reflect"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestFilled(t *testing.T) {
	one, two := "1", "2"
	keys := []FileKey{
		{Name: "A", Absent: "$(A)"},
		{Name: "B", Absent: "before " + FileWord(0)},
		{Absent: "none"},
	}
	args := []string{"plain", "-" + FileWord(0) + FileWord(1) + FileWord(2), FileWord(3)}
	env := []string{"B=env", "C=" + FileWord(1), "AA=x"}
	for name, tc := range map[string]struct {
		values    []*string
		args, env string
	}{
		"all":  {[]*string{&one, &two, &one}, "plain -121", "C=2 AA=x A=1 B=2"},
		"none": {[]*string{nil, nil, nil}, "plain -$(A)before $(A)none", "B=env C=before $(A) AA=x"},
		"some": {[]*string{&one, nil, &two}, "plain -1before 12", "B=env C=before 1 AA=x A=1"},
	} {
		gotArgs, gotEnv := Filled(args, env, keys, tc.values)
		if got := strings.Join(gotArgs[:2], " "); got != tc.args || gotArgs[2] != FileWord(3) || strings.Join(gotEnv, " ") != tc.env {
			t.Errorf("%s: %q %q", name, gotArgs, gotEnv)
		}
	}
	if env[1] != "C="+FileWord(1) {
		t.Errorf("the environment itself changed: %q", env)
	}
}

func TestFilledValuesAreLiteral(t *testing.T) {
	a, b := FileWord(1), "secret"
	args, env := Filled([]string{FileWord(0)}, nil, []FileKey{{Name: "A"}, {}}, []*string{&a, &b})
	if want := []string{"A=" + a}; args[0] != a || !reflect.DeepEqual(env, want) {
		t.Errorf("a word in a file is replaced: %q %q", args, env)
	}
}

func TestFileKeysAreValidated(t *testing.T) {
	good := FileKey{Name: "A", Volume: "v", Path: "dir/f", Key: "A"}
	for name, tc := range map[string]struct {
		change func(*FileKey)
		ok     bool
	}{
		"good":            {func(*FileKey) {}, true},
		"no name":         {func(k *FileKey) { k.Name = "" }, true},
		"bad name":        {func(k *FileKey) { k.Name = "A=B" }, false},
		"no key":          {func(k *FileKey) { k.Key = "" }, false},
		"no path":         {func(k *FileKey) { k.Path = "" }, false},
		"absolute":        {func(k *FileKey) { k.Path = "/f" }, false},
		"out of it":       {func(k *FileKey) { k.Path = "../f" }, false},
		"no volume":       {func(k *FileKey) { k.Volume = "none" }, false},
		"volume of files": {func(k *FileKey) { k.Volume = "files" }, false},
	} {
		k := good
		tc.change(&k)
		s := Spec{Volumes: []Volume{{Name: "v", Kind: VolumeEmpty}, {Name: "files", Kind: VolumeFiles}}}
		s.Containers = []Container{{Name: "c", Process: Process{FileKeys: []FileKey{k}}}}
		if err := s.ValidateVolumes(); (err == nil) != tc.ok || err != nil && !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
