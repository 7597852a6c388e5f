{{/* Texts of values that have not the form that files/formats.yaml asks for, all in one error. */}}

{{- define "npuserve.formatChecks" -}}
{{- $problems := list }}
{{- range $format := (.Files.Get "files/formats.yaml" | fromYaml).formats }}
{{- $texts := dict }}
{{- range $path := default list $format.values }}
{{- include "npuserve.valuesAt" (dict "node" $.Values "parts" (splitList "." $path) "name" "" "texts" $texts) }}
{{- end }}
{{- range $path := default list $format.keys }}
{{- $maps := dict }}
{{- include "npuserve.valuesAt" (dict "node" $.Values "parts" (splitList "." $path) "name" "" "texts" $maps) }}
{{- range $name, $map := $maps }}
{{- range $key, $_ := $map }}
{{- $_ := set $texts (printf "%s.%s" $name $key) $key }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $text := $texts }}
{{- if kindIs "string" $text }}
{{- if not (regexMatch $format.pattern $text) }}
{{- $problems = printf "%s: %q is not %s" $name $text $format.wanted | append $problems }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- with $problems }}
{{- include "npuserve.refuse" (join "; also " .) }}
{{- end }}
{{- end }}

{{/* Add to `texts` the values of a path by their names. node: a value; parts: the rest of its path, * for every item. */}}
{{- define "npuserve.valuesAt" -}}
{{- if not .parts }}
{{- $_ := set .texts (trimPrefix "." .name) .node }}
{{- else if or (kindIs "map" .node) (kindIs "slice" .node) }}
{{- $part := first .parts }}
{{- if eq $part "*" }}
{{- range $key, $value := .node }}
{{- include "npuserve.valuesAt" (dict "node" $value "parts" (rest $.parts) "name" (printf "%s.%v" $.name $key) "texts" $.texts) }}
{{- end }}
{{- else if kindIs "map" .node }}
{{- if hasKey .node $part }}
{{- include "npuserve.valuesAt" (dict "node" (get .node $part) "parts" (rest .parts) "name" (printf "%s.%s" .name $part) "texts" .texts) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* End with the context as the error. Helm 3.6 puts the templates' sources into the errors of `fail`. Those of `required`
are the text alone if it is one line, in which a % is read as a verb. `helm lint` passes over both, and fails because the
text is no YAML. */}}
{{- define "npuserve.refuse" -}}
{{- required (replace "%" " percent" .) nil }}
refused: [{{ . }}
{{ end }}
