package vm

import "strings"

// DefaultPath is the PATH of a process when neither image nor spec sets one.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Over returns the process that runs when p, from a spec, overrides the image's own configuration:
//   - setting Entrypoint drops the image's entrypoint and args; setting only Args keeps the image's entrypoint;
//   - variables are added to the image's; a variable of the same name is replaced in place, and the last of several wins;
//   - PATH is DefaultPath if neither sets it, the working directory is / if neither sets it;
//   - User, WorkDir and StopSignal of p win when not empty; a User that is only a group (:group) keeps the image's user;
//   - only p decides about standard input, a read-only root, security and variables from files.
//
// The result shares no memory with either. When neither names a program, its Entrypoint and Args are both empty.
func (p Process) Over(image Process) Process {
	out := Process{
		Entrypoint: cloneSlice(image.Entrypoint),
		Args:       cloneSlice(image.Args),
		Env:        mergeEnv(image.Env, p.Env),
		WorkDir:    firstOf(p.WorkDir, image.WorkDir, "/"),
		User:       userOver(p.User, image.User),
		TTY:        p.TTY || image.TTY,
		Stdin:      p.Stdin,
		StdinOnce:  p.StdinOnce,

		ReadOnlyRoot: p.ReadOnlyRoot,
		Security:     p.Security.Clone(),
		StopSignal:   firstOf(p.StopSignal, image.StopSignal),
		FileKeys:     cloneSlice(p.FileKeys),
	}
	if len(p.Entrypoint) > 0 {
		out.Entrypoint, out.Args = cloneSlice(p.Entrypoint), nil
	}
	if len(p.Args) > 0 {
		out.Args = cloneSlice(p.Args)
	}
	return out
}

// Empty reports whether p names no program at all.
func (p Process) Empty() bool { return len(p.Entrypoint) == 0 && len(p.Args) == 0 }

// userOver returns the user that own makes of the image's.
func userOver(own, image string) string {
	if strings.HasPrefix(own, ":") {
		name, _, _ := strings.Cut(image, ":")
		return name + own
	}
	return firstOf(own, image)
}

func mergeEnv(layers ...[]EnvVar) []EnvVar {
	var out []EnvVar
	at := map[string]int{}
	for _, layer := range layers {
		for _, v := range layer {
			if i, ok := at[v.Name]; ok {
				out[i] = v
				continue
			}
			at[v.Name] = len(out)
			out = append(out, v)
		}
	}
	if _, ok := at["PATH"]; !ok {
		out = append(out, EnvVar{Name: "PATH", Value: DefaultPath})
	}
	return out
}

func firstOf(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}
