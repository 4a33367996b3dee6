// Package settings reads the settings of a daemon from flags, environment variables and a YAML file, by one table.
//
// A Setting has its names, its default, its meaning and the field that holds it. A flag wins over the variable, the
// variable over the key of the file, the key over the default. A value that is overridden must still be valid. A key of
// the file that is not in the table is an error. An empty variable counts as not set. A secret has a variable only,
// because everybody can read a command line.
//
// The help is made from the table. docs/reference.md and the examples of environment files are compared with it. The
// package checks types only: the daemon checks what values mean and which go together. It logs nothing, and it does not
// notice later changes of the file.
//
// Errors name the setting and its source. They are InvalidArgument, or NotFound when there is no such file.
package settings

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Setting is one row of the table. A setting without a Flag, Env or Key cannot be given in that way.
type Setting struct {
	Flag    string // without the dashes
	Env     string
	Key     string // in the file; a dot leads into a group: log.level
	Default string // in the form of the variable; "": the zero value
	Usage   string
	Value   Value // the field
}

// Set holds all settings of one program.
type Set struct {
	program string
	all     []Setting
	path    string            // of the file
	given   map[string]string // on the command line, by flag
}

// New returns the settings of a program. The flag --config and the variable file name its file. If file is "", the
// program has none.
func New(program, file string, all []Setting) *Set {
	s := &Set{program: program, given: map[string]string{}}
	if file != "" {
		s.all = []Setting{{Flag: "config", Env: file, Value: Text(&s.path), Usage: "YAML `FILE` with settings"}}
	}
	s.all = append(s.all, all...)
	return s
}

// Fill gives the settings that have the zero value their defaults.
func Fill(all []Setting) {
	for _, x := range all {
		if x.Default != "" && x.Value.zero() {
			_ = x.Value.Set(x.Default) // tests check the defaults
		}
	}
}

// ways lists how else than by flag x can be given.
func (x Setting) ways() string {
	return strings.TrimPrefix(strings.TrimSuffix("$"+x.Env+", "+x.Key+":", ", :"), "$, ")
}

// Flags declares the flags. Read gives their values to the fields.
func (s *Set) Flags(f *pflag.FlagSet) {
	f.SortFlags = false
	for _, x := range s.all {
		if x.Flag == "" {
			continue
		}
		declared := f.VarPF(given{x, s.given}, x.Flag, "", x.Usage+" ["+x.ways()+"]")
		if x.Value.Type() == "bool" {
			declared.NoOptDefVal = "true"
		}
	}
}

// Unflagged lists the settings without a flag, for the help.
func Unflagged(all []Setting) string {
	var b strings.Builder
	for _, x := range all {
		if x.Flag != "" {
			continue
		}
		if x.Default != "" {
			x.Usage += " (default " + x.Default + ")"
		}
		fmt.Fprintf(&b, "  %-36s %s\n", x.ways(), x.Usage)
	}
	return b.String()
}

// Parse reads the settings of a program without verbs. If args ask for help, it writes it below head and returns
// pflag.ErrHelp.
func (s *Set) Parse(head string, args []string, env func(string) string, help io.Writer) error {
	f := pflag.NewFlagSet(s.program, pflag.ContinueOnError)
	s.Flags(f)
	f.Usage = func() {
		fmt.Fprintf(help, "%s\nUsage:\n%s\nWithout a flag:\n%s", head, f.FlagUsages(), Unflagged(s.all))
	}
	switch err := f.Parse(args); {
	case errors.Is(err, pflag.ErrHelp):
		return err
	case err != nil:
		return errdefs.As(errdefs.InvalidArgument, err)
	case f.NArg() > 0:
		return errdefs.Invalidf("%s takes no arguments, only flags; %q is one", s.program, f.Arg(0))
	}
	return s.Read(env)
}

// Read gives every field its value. Preconditions: the declared flags are parsed.
func (s *Set) Read(env func(string) string) error {
	Fill(s.all)
	for i, x := range s.all {
		if v := env(x.Env); x.Env != "" && v != "" {
			if err := x.Value.Set(v); err != nil {
				return errdefs.Invalidf("%s: %w", x.Env, err)
			}
		}
		if v, ok := s.given[x.Flag]; ok {
			if err := x.Value.Set(v); err != nil {
				return errdefs.Invalidf("--%s: %w", x.Flag, err)
			}
		}
		if i == 0 && s.path != "" { // the first setting names the file
			if err := s.read(s.path); err != nil {
				return err
			}
		}
	}
	return nil
}

// given is a flag. It keeps the text until the file and the environment are read, because these count less.
type given struct {
	Setting
	texts map[string]string
}

func (g given) String() string { return cmp.Or(g.Default, g.Value.String()) }
func (g given) Type() string   { return g.Value.Type() }

func (g given) Set(text string) error {
	if before, again := g.texts[g.Flag]; again && g.Type() == listType {
		text = before + "," + text
	}
	g.texts[g.Flag] = text
	return nil
}
