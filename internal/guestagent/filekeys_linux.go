package guestagent

import (
	"strings"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// configured waits until what the next run of c needs from files is there, as the kubelet waits for it, and returns the command of
// the run. It returns false if c was halted meanwhile.
func (p *containers) configured(c *container) (args, env []string, ok bool) {
	for {
		if p.halted(c) {
			return nil, nil, false
		}
		args, env, err := c.configure()
		if err == nil {
			return args, env, true
		}
		p.change(func() {
			c.status.State, c.status.Reason, c.status.Message = vm.ContainerWaiting, vm.ContainerConfigError, err.Error()
		})
		p.wait(c, p.pace.base)
	}
}

// configure returns the arguments and the environment of a run that begins now.
func (c *container) configure() (args, env []string, err error) {
	if c.lacks != nil {
		return nil, nil, c.lacks
	}
	values := make([]*string, len(c.fileKeys))
	for i, k := range c.fileKeys {
		text, err := c.readFile(k.Volume, k.Path, envFileBytes)
		switch {
		case errdefs.IsNotFound(err) && k.Optional:
			continue
		case err != nil:
			return nil, nil, errdefs.Preconditionf("couldn't parse env file %q of volume %q: %w", k.Path, k.Volume, err)
		}
		value, err := valueIn(string(text), k.Key)
		switch {
		case err != nil:
			return nil, nil, errdefs.Preconditionf("couldn't parse env file %q of volume %q: %w", k.Path, k.Volume, err)
		case strings.IndexByte(value, 0) >= 0:
			return nil, nil, errdefs.Preconditionf("environment variable key %q in file %q of volume %q has a value with NUL bytes", k.Key, k.Path, k.Volume)
		case value != "": // an empty value counts as absent, as for the kubelet
			values[i] = &value
		case !k.Optional:
			return nil, nil, errdefs.Preconditionf("environment variable key %q not found in file %q of volume %q", k.Key, k.Path, k.Volume)
		}
	}
	args, env = vm.Filled(c.command.args, c.command.env, c.fileKeys, values)
	return args, env, nil
}

func fileKeys(list []*guestv1.FileKey) (out []vm.FileKey) {
	for _, k := range list {
		out = append(out, vm.FileKey{
			Name: k.GetName(), Volume: k.GetVolume(), Path: k.GetPath(), Key: k.GetKey(), Optional: k.GetOptional(), Absent: k.GetAbsent(),
		})
	}
	return out
}
