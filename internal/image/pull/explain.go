package pull

import (
	"context"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/translate"
)

// Explain implements image.Puller.
func (p *Puller) Explain(ctx context.Context, name string) (image.Explanation, error) {
	d, err := p.names.Translate(name)
	if err != nil {
		return image.Explanation{}, err
	}
	e := image.Explanation{
		Name: d.Name.String(), Kind: string(d.Kind), Key: d.Key, URL: d.Printable, Source: d.Source, Rule: d.Rule,
		Transport: transport(d), Steps: d.Steps,
	}
	here, err := p.find(ctx, d, name)
	if err != nil && !errdefs.IsNotFound(err) {
		return image.Explanation{}, err
	}
	e.Present = err == nil
	e.Steps = append(e.Steps, policies(d, here, e.Present)...)
	return e, nil
}

func transport(d translate.Decision) string {
	switch {
	case d.Ref != "":
		return "a registry, with the credentials of the request, then those of the host's docker configuration"
	case d.URL == "":
		return ""
	case d.TransportName != "":
		return fmt.Sprintf("profile %q: %s", d.TransportName, d.Transport)
	}
	return d.Transport.String()
}

// policies describes what each pull policy would do.
func policies(d translate.Decision, here found, present bool) []string {
	switch {
	case !present && d.Kind == translate.Local:
		return []string{"no image here has this id, and an id does not say where to fetch the image"}
	case !present:
		return []string{"it is not here: Always and IfNotPresent would fetch it, Never would fail"}
	case d.Kind == translate.Local:
		return []string{"it is here as " + here.img.Name + ": every policy uses it"}
	}
	step := "it is here as " + here.img.Name + " (" + here.img.ID + ")"
	if here.imported() {
		return []string{step + ", imported by hand: every policy uses it for a pod; only a pull by force would fetch it"}
	}
	return []string{step + ": IfNotPresent and Never use it, Always would ask whether there is something newer"}
}
