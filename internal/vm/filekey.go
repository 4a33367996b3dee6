package vm

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// maxFileKeys limits the variables that one container reads from files.
const maxFileKeys = 1024

// FileKey is a variable whose value is in a file of a volume. The guest reads the file each time the process starts. The process
// waits until the file has the value, unless the key is optional.
type FileKey struct {
	Name     string `json:"name,omitempty"` // of the variable; "": another variable replaces it, and only its word stands for it
	Volume   string `json:"volume"`         // one that starts empty
	Path     string `json:"path"`           // of the file, inside the volume
	Key      string `json:"key"`
	Optional bool   `json:"optional,omitempty"`
	// Absent is what its word means while an optional value is absent. The variable then has the value that Env has for it, if any.
	Absent string `json:"absent,omitempty"`
}

// FileWord is the word for the value of the i-th of FileKeys in the environment, the entrypoint and the arguments of a Process.
func FileWord(i int) string { return "\x00file " + strconv.Itoa(i) + "\x00" }

// Filled returns args and env (NAME=value) of a process with keys, whose values are values; nil: it is absent.
func Filled(args, env []string, keys []FileKey, values []*string) (filledArgs, filledEnv []string) {
	if len(keys) == 0 {
		return args, env
	}
	var pairs []string
	text := func(s string) string { return strings.NewReplacer(pairs...).Replace(s) }
	for i, k := range keys {
		value := text(k.Absent)
		if values[i] != nil {
			value = *values[i]
		}
		pairs = append(pairs, FileWord(i), value)
	}
	args, env = slices.Clone(args), slices.Clone(env)
	for _, list := range [][]string{args, env} {
		for i := range list {
			list[i] = text(list[i])
		}
	}
	for i, k := range keys {
		if k.Name == "" || values[i] == nil {
			continue
		}
		env = slices.DeleteFunc(env, func(e string) bool { return strings.HasPrefix(e, k.Name+"=") })
		env = append(env, k.Name+"="+*values[i])
	}
	return args, env
}

// ValidateIn checks what c, which is to be added to a running guest, needs of the guest's volumes.
func (c Container) ValidateIn(volumes []Volume) error {
	known := map[string]VolumeKind{}
	for _, v := range c.Volumes {
		if own := OwnVolume(c.Name, v.Name); slices.ContainsFunc(volumes, func(o Volume) bool { return o.Name == own }) {
			return errdefs.Invalidf("container %s: the VM has a volume %s, which the volume %s of the container would be in the guest; give one of them another name", c.Name, own, v.Name)
		}
	}
	for _, v := range slices.Concat(volumes, c.Volumes) {
		if known[v.Name] != "" {
			return errdefs.Invalidf("container %s: two volumes have the name %q", c.Name, v.Name)
		}
		known[v.Name] = v.Kind
	}
	if err := validateMounts(c.Mounts, known); err != nil {
		return fmt.Errorf("container %s: %w", c.Name, err)
	}
	return c.validateFileKeys(volumes)
}

// validateFileKeys checks the variables of c that are in files of volumes, which are all that its VM has.
func (c Container) validateFileKeys(volumes []Volume) error {
	if n := len(c.Process.FileKeys); n > maxFileKeys {
		return errdefs.Invalidf("container %s: it reads %d variables from files; at most %d are possible", c.Name, n, maxFileKeys)
	}
	for _, k := range c.Process.FileKeys {
		switch {
		case k.Name != "" && !envRE.MatchString(k.Name):
			return errdefs.Invalidf("container %s: invalid environment variable name %q", c.Name, k.Name)
		case k.Key == "":
			return errdefs.Invalidf("container %s: the variable %s needs a key in the file %s", c.Name, k.Name, k.Path)
		case !localPath(k.Path):
			return errdefs.Invalidf("container %s: the variable %s is in the file %q, which is not a path inside a volume", c.Name, k.Name, k.Path)
		case !slices.ContainsFunc(volumes, func(v Volume) bool { return v.Name == k.Volume && v.Kind == VolumeEmpty }):
			return errdefs.Invalidf("container %s: the variable %s is in a file of volume %q, and the VM has no volume of that name that starts empty", c.Name, k.Name, k.Volume)
		}
	}
	return nil
}
